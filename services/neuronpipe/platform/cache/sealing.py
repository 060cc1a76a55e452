"""The format of values in Redis: a version, and a digest that binds the payload to its key.

A stored value may be truncated, corrupted, written by another version, or belong to another key. A value is used only
if its digest over key and payload is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

# The version of the whole format, payloads included. A new number makes all older values unreadable.
FORMAT = b"\x01"

_DIGEST_BYTES = 8
_HEAD_BYTES = len(FORMAT) + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class ValueCodec(Generic[ValueT]):
    """Converts values to compact payloads and back. `size_bytes`: returns the memory that a value takes."""

    pack: Callable[[ValueT], bytes]
    unpack: Callable[[bytes], ValueT]
    size_bytes: Callable[[ValueT], int]


def seal(key: bytes, payload: bytes) -> bytes:
    """Returns the stored value of a key: version, digest and payload."""
    return FORMAT + _digest(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes | None:
    """Returns the payload of a stored value; None unless it is intact, and has this version and key."""
    payload = value[_HEAD_BYTES:]
    return payload if value[:_HEAD_BYTES] == FORMAT + _digest(key, payload) else None


def _digest(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES, key=key[:64]).digest()
