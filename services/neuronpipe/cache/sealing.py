"""Values as they lie in Redis: with a version, and a digest that ties them to their key.

What comes back may have been cut, corrupted, written by another version, or be the answer to another question. A value is used only
where its digest, over key and payload, is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

# The meaning of all that follows it, payloads included: another number, and no older value is read.
FORMAT = b"\x01"

_DIGEST_BYTES = 8
_HEAD_BYTES = len(FORMAT) + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Codec:
    """How payloads are made small for Redis, and whole again."""

    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes], bytes]


AS_IT_IS = Codec(lambda payload: payload, lambda payload: payload)


def seal(key: bytes, payload: bytes) -> bytes:
    """A payload as the value of a key."""
    return FORMAT + _digest(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes | None:
    """The payload of a key's value; None where it is not a whole one of this version, sealed for this key."""
    payload = value[_HEAD_BYTES:]
    return payload if value[:_HEAD_BYTES] == FORMAT + _digest(key, payload) else None


def _digest(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES, key=key[:64]).digest()
