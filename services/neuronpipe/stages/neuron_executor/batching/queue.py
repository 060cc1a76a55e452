"""The sequences that wait for one model, by priority and padded length."""

import asyncio
import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext

# The number of entries of callers who left that may stay in a heap, or as many as there are waiting ones.
_MAX_LEFT_BEHIND = 16


@dataclass(slots=True)
class ComputedSequence:
    """One sequence's outputs and the batch in which it ran; times are on time.monotonic_ns()."""

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int


@dataclass(order=True, slots=True)
class QueuedSequence:
    """A sequence until its result is there.

    Those of tenants within their shares come first, then older ones, and of the same age those with the earliest
    deadline. `padded_tokens` is the length to which the back end pads it in a batch of its own. `deadline_s` is on
    time.monotonic(), infinite for none. `trace`: of its item, if that is sampled. `mates`: the sequences of its item,
    itself included, where they are computed in one batch (whole_items.py). `lost_cores` counts the cores that were lost
    while they computed it.
    """

    is_beyond_share: bool
    arrived_s: float
    deadline_s: float
    number: int
    is_bulk: bool = field(compare=False)
    arrays: Arrays = field(compare=False)
    tokens: int = field(compare=False)
    padded_tokens: int = field(compare=False)
    future: "asyncio.Future[ComputedSequence]" = field(compare=False)
    trace: SpanContext | None = field(default=None, compare=False)
    mates: "Sequence[QueuedSequence]" = field(default=(), compare=False)
    lost_cores: int = field(default=0, compare=False)
    is_waiting: bool = field(default=False, compare=False)

    def is_wanted(self, duration_s: float) -> bool:
        """Whether a caller waits for it, and still will after `duration_s`.

        A caller whose deadline cannot be met gets DeadlineExceeded.
        """
        if self.future.done():
            return False
        if time.monotonic() + duration_s >= self.deadline_s:
            self.future.set_exception(DeadlineExceeded("the deadline would pass before the model has run"))
            return False
        return True


class SequenceQueue:
    """Waiting sequences. Their number is not limited here; the model limits it."""

    def __init__(self) -> None:
        # For interactive and bulk sequences: heaps by padded length. None is empty, and the first of each still waits.
        self._heaps: tuple[dict[int, _Heap], dict[int, _Heap]] = ({}, {})
        self._count = 0
        # Padded tokens of interactive and of bulk sequences.
        self._tokens = [0, 0]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedSequence]:
        return (one for heaps in self._heaps for heap in heaps.values() for one in heap.entries if one.is_waiting)

    def tokens_before(self, *, is_bulk: bool) -> int:
        """The padded tokens of the sequences that go before a new one."""
        return self._tokens[0] + self._tokens[1] if is_bulk else self._tokens[0]

    def push(self, one: QueuedSequence) -> None:
        """Adds a sequence."""
        heaps = self._heaps[one.is_bulk]
        heap = heaps.get(one.padded_tokens)
        if heap is None:
            heap = heaps[one.padded_tokens] = _Heap()
        heapq.heappush(heap.entries, one)
        heap.waiting += 1
        one.is_waiting = True
        self._count += 1
        self._tokens[one.is_bulk] += one.padded_tokens

    def oldest(self) -> QueuedSequence | None:
        """The sequence that goes first: the oldest interactive one, or the oldest bulk one if there is none."""
        for heaps in self._heaps:
            if heaps:
                return min(heap.entries[0] for heap in heaps.values())
        return None

    def lengths(self, *, is_bulk: bool) -> Iterable[int]:
        """The padded lengths of waiting sequences."""
        return self._heaps[is_bulk].keys()

    def near(self, tokens: int, *, is_bulk: bool) -> list[int]:
        """The padded lengths of waiting sequences, nearest first."""
        return sorted(self.lengths(is_bulk=is_bulk), key=lambda length: (abs(length - tokens), length))

    def count(self, padded_tokens: int, *, is_bulk: bool) -> int:
        """The number of waiting sequences of a padded length."""
        heap = self._heaps[is_bulk].get(padded_tokens)
        return heap.waiting if heap else 0

    def first(self, padded_tokens: int, *, is_bulk: bool) -> QueuedSequence | None:
        """The oldest sequence of a padded length."""
        heap = self._heaps[is_bulk].get(padded_tokens)
        return heap.entries[0] if heap else None

    def remove(self, one: QueuedSequence) -> None:
        """Removes a waiting sequence at any position. It is fast, because its entry may stay in the heap."""
        heaps = self._heaps[one.is_bulk]
        heap = heaps[one.padded_tokens]
        one.is_waiting = False
        heap.waiting -= 1
        self._count -= 1
        self._tokens[one.is_bulk] -= one.padded_tokens
        if heap.waiting:
            heap.tidy()
        else:
            del heaps[one.padded_tokens]

    def forget(self, one: QueuedSequence) -> None:
        """Removes a sequence that nobody waits for, with its arrays. It does nothing if the sequence is not queued."""
        if one.is_waiting:
            self.remove(one)
            one.arrays = {}

    def forget_unwanted(self) -> None:
        """Removes the sequences that would be too late."""
        for one in list(self):
            if not one.is_wanted(0):
                self.forget(one)


class _Heap:
    """The sequences of one padded length, and the number of entries that still wait."""

    __slots__ = ("entries", "waiting")

    def __init__(self) -> None:
        self.entries: list[QueuedSequence] = []
        self.waiting = 0

    def tidy(self) -> None:
        """Removes entries that no longer wait: those at the front, and all of them if there are many."""
        while not self.entries[0].is_waiting:
            heapq.heappop(self.entries)
        if len(self.entries) - self.waiting > max(self.waiting, _MAX_LEFT_BEHIND):
            self.entries = [one for one in self.entries if one.is_waiting]
            heapq.heapify(self.entries)
