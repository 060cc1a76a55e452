"""Values as they lie in Redis: with a version, and a digest that ties them to their key.

What comes back may have been cut, corrupted, written by another version, or be the answer to another question. A value is used only
where its digest, over key and payload, is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

# The meaning of all that follows it, payloads included: another number, and no older value is read.
FORMAT = b"\x01"

_DIGEST_BYTES = 8
_HEAD_BYTES = len(FORMAT) + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class ValueCodec(Generic[ValueT]):
    """How values become payloads, small ones, and values again; `size_bytes` is what a value takes in memory."""

    pack: Callable[[ValueT], bytes]
    unpack: Callable[[bytes], ValueT]
    size_bytes: Callable[[ValueT], int]


def seal(key: bytes, payload: bytes) -> bytes:
    """A payload as the value of a key."""
    return FORMAT + _digest(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes | None:
    """The payload of a key's value; None where it is not a whole one of this version, sealed for this key."""
    payload = value[_HEAD_BYTES:]
    return payload if value[:_HEAD_BYTES] == FORMAT + _digest(key, payload) else None


def _digest(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES, key=key[:64]).digest()
