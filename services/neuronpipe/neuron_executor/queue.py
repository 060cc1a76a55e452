"""The sequences that wait for one model, by priority and padded length."""

import asyncio
import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext

ResultT = TypeVar("ResultT")


@dataclass(order=True, slots=True)
class Waiting(Generic[ResultT]):
    """A sequence until its result is there. Older ones come first, and of the same age those with the earliest deadline.

    `padded_tokens` is what the back end makes of its length alone; `deadline_s` is on time.monotonic(), infinite for none. `trace`: of its
    item, where that is sampled. `lost_cores` counts those that were lost while they computed it.
    """

    arrived_s: float
    deadline_s: float
    number: int
    is_bulk: bool = field(compare=False)
    arrays: Arrays = field(compare=False)
    tokens: int = field(compare=False)
    padded_tokens: int = field(compare=False)
    future: "asyncio.Future[ResultT]" = field(compare=False)
    trace: SpanContext | None = field(default=None, compare=False)
    lost_cores: int = field(default=0, compare=False)

    def is_wanted(self, duration_s: float) -> bool:
        """Whether someone waits for it, and still will after `duration_s`; tells a caller whose deadline cannot be met so."""
        if self.future.done():
            return False
        if time.monotonic() + duration_s >= self.deadline_s:
            self.future.set_exception(DeadlineExceeded("the deadline would pass before the model has run"))
            return False
        return True


class SequenceQueue(Generic[ResultT]):
    """Waiting sequences. Takes any number; how many there may be is the scheduler's business."""

    def __init__(self) -> None:
        # Of interactive and of bulk sequences: a heap for each padded length.
        self._heaps: tuple[dict[int, list[Waiting[ResultT]]], ...] = ({}, {})
        self._count = 0
        # Padded tokens, of interactive and of bulk sequences.
        self._tokens = [0, 0]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting[ResultT]]:
        return (one for heaps in self._heaps for heap in heaps.values() for one in heap)

    def tokens_before(self, *, is_bulk: bool) -> int:
        """Padded tokens of what goes before a new sequence."""
        return self._tokens[0] + self._tokens[1] if is_bulk else self._tokens[0]

    def push(self, one: Waiting[ResultT]) -> None:
        """Adds a sequence."""
        heapq.heappush(self._heaps[one.is_bulk].setdefault(one.padded_tokens, []), one)
        self._count += 1
        self._tokens[one.is_bulk] += one.padded_tokens

    def oldest(self) -> Waiting[ResultT] | None:
        """The sequence that goes first: the oldest interactive one, or the oldest of all where none is."""
        for heaps in self._heaps:
            if heaps:
                return min(heap[0] for heap in heaps.values())
        return None

    def lengths(self, *, is_bulk: bool) -> Iterable[int]:
        """The padded lengths of waiting sequences."""
        return self._heaps[is_bulk].keys()

    def near(self, tokens: int, *, is_bulk: bool) -> list[int]:
        """The padded lengths of waiting sequences, nearest first."""
        return sorted(self.lengths(is_bulk=is_bulk), key=lambda length: (abs(length - tokens), length))

    def count(self, padded_tokens: int, *, is_bulk: bool) -> int:
        """How many sequences of a padded length wait."""
        return len(self._heaps[is_bulk].get(padded_tokens, ()))

    def first(self, padded_tokens: int, *, is_bulk: bool) -> Waiting[ResultT] | None:
        """The oldest sequence of a padded length."""
        heap = self._heaps[is_bulk].get(padded_tokens)
        return heap[0] if heap else None

    def pop(self, one: Waiting[ResultT]) -> None:
        """Removes the oldest sequence of its priority and length."""
        heap = self._heaps[one.is_bulk][one.padded_tokens]
        assert heap[0] is one  # noqa: S101
        heapq.heappop(heap)
        if not heap:
            del self._heaps[one.is_bulk][one.padded_tokens]
        self._count -= 1
        self._tokens[one.is_bulk] -= one.padded_tokens

    def drop_unwanted(self) -> None:
        """Removes what nobody waits for any more."""
        kept = [one for one in self if one.is_wanted(0)]
        self.clear()
        for one in kept:
            self.push(one)

    def clear(self) -> None:
        """Removes everything."""
        for heaps in self._heaps:
            heaps.clear()
        self._count, self._tokens = 0, [0, 0]
