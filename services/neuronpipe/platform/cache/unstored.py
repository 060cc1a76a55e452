"""The queue of values to be stored in Redis."""

from typing import Generic

from neuronpipe.platform.cache.sealing import ValueCodec, ValueT, seal

# Beyond this, values are dropped; they are computed again when needed.
_MAX_BYTES = 8 << 20
# Larger values are not stored in the shared cache.
_MAX_VALUE_BYTES = 1 << 20
# Packed in one pass of the event loop, which takes 1 ms. A single larger value is packed alone.
_MAX_BATCH_BYTES = 256 << 10


class Unstored(Generic[ValueT]):
    """A first-in, first-out queue of values, which are packed only when they are taken out."""

    def __init__(self, codec: ValueCodec[ValueT]) -> None:
        self._codec = codec
        # With the size of each.
        self._values: dict[bytes, tuple[ValueT, int]] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: bytes, value: ValueT) -> None:
        """Adds a value if there is room for it."""
        size_bytes = self._codec.size_bytes(value)
        if size_bytes > _MAX_VALUE_BYTES or self._size_bytes + size_bytes > _MAX_BYTES:
            return
        if before := self._values.get(key):
            self._size_bytes -= before[1]
        self._values[key] = value, size_bytes
        self._size_bytes += size_bytes

    def next_sealed(self, max_values: int) -> dict[bytes, bytes]:
        """Takes out the next values, sealed."""
        batch: dict[bytes, bytes] = {}
        taken_bytes = 0
        while self._values and len(batch) < max_values and taken_bytes < _MAX_BATCH_BYTES:
            key = next(iter(self._values))
            value, size_bytes = self._values.pop(key)
            taken_bytes += size_bytes
            batch[key] = seal(key, self._codec.pack(value))
        self._size_bytes -= taken_bytes
        return batch

    def clear(self) -> None:
        """Drops everything."""
        self._values.clear()
        self._size_bytes = 0
