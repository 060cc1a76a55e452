"""An LRU cache in the memory of this process."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

# What an entry takes besides the bytes of its key and its value: two objects' headers, a pair, a number and a place in
# the table (measured with tracemalloc on CPython 3.11, 2026-11-22: 239 bytes).
_OVERHEAD_BYTES = 240


class MemoryCache(Generic[ValueT]):
    """Holds at most `max_bytes`, including keys and overhead.

    A value that takes more than an eighth of this limit is not kept.
    """

    def __init__(self, max_bytes: int, size_bytes_of: Callable[[ValueT], int]) -> None:
        """`size_bytes_of` returns the memory that a value takes when it is put."""
        self._max_bytes = max_bytes
        self._size_bytes_of = size_bytes_of
        # Each value with the bytes that it takes.
        self._values: OrderedDict[bytes, tuple[ValueT, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> ValueT | None:
        """The value, marked as used now; None if it is missing."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: bytes, value: ValueT) -> None:
        """Stores a value, and evicts the least recently used ones to make room."""
        taken = len(key) + self._size_bytes_of(value) + _OVERHEAD_BYTES
        if taken * 8 > self._max_bytes:
            return
        before = self._values.pop(key, None)
        if before is not None:
            self.size_bytes -= before[1]
        self._values[key] = value, taken
        self.size_bytes += taken
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= self._values.popitem(last=False)[1][1]
