"""The waiting sequences of one model, in the order in which they are computed."""

import asyncio
import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext

# Entries without a waiting caller that may stay in a heap, or as many as there are waiting entries if that is more.
_MAX_LEFT_BEHIND = 16


@dataclass(slots=True)
class ComputedSequence:
    """The outputs of one sequence, and the batch in which it ran. Times are on time.monotonic_ns()."""

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int


class QueueRank(NamedTuple):
    """The place of a sequence among others: sequences of lower rank go first.

    Sequences of tenants within their shares come first, then older sequences, and at the same age the sequence with the
    earliest deadline. `deadline_s`: a time of time.monotonic(), infinite without a deadline.
    """

    is_beyond_share: bool
    arrived_s: float
    deadline_s: float
    number: int


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedSequence:
    """A sequence until its result is there, or several that share its place in the queue; see packing.

    - `inputs`: the arrays of each sequence at this place, the longest sequence first.
    - `tokens`: the number of their tokens together.
    - `padded_tokens`: the length to which the back end pads each sequence in a batch of its own.
    - `trace`: the span context of its item if that is sampled.
    - `positions`: the positions of the sequences in their item.
    - `lost_cores`: number of cores that were lost while they computed it.
    """

    rank: QueueRank
    is_bulk: bool
    inputs: Sequence[Arrays]
    tokens: int
    padded_tokens: int
    future: "asyncio.Future[list[ComputedSequence]]"
    trace: SpanContext | None = None
    positions: Sequence[int] = (0,)
    lost_cores: int = 0
    is_waiting: bool = False

    def __lt__(self, other: "QueuedSequence") -> bool:
        return self.rank < other.rank

    @property
    def deadline_s(self) -> float:
        return self.rank.deadline_s

    @property
    def rows(self) -> int:
        """The number of rows that it takes in a batch."""
        return len(self.inputs)

    def expire_if_late(self, duration_s: float) -> bool:
        """Gives DeadlineExceeded to a caller who would get the result too late, in `duration_s`.

        Returns whether no caller waits for the result now.
        """
        if self.future.done():
            return True
        if time.monotonic() + duration_s >= self.deadline_s:
            self.future.set_exception(DeadlineExceeded("the deadline would pass before the model has run"))
            return True
        return False


class SequenceQueue:
    """Waiting sequences. The model limits their number."""

    def __init__(self) -> None:
        # The heaps of interactive and of bulk sequences by padded length. No heap is empty; its first entry waits.
        self._heaps: tuple[dict[int, _Heap], dict[int, _Heap]] = ({}, {})
        self._rows = 0
        # Padded tokens of interactive and of bulk sequences.
        self._tokens = [0, 0]

    def __len__(self) -> int:
        """Counts the waiting sequences, each of which becomes a row of a batch."""
        return self._rows

    def __iter__(self) -> Iterator[QueuedSequence]:
        return (entry for heaps in self._heaps for heap in heaps.values() for entry in heap.entries if entry.is_waiting)

    def tokens_before(self, *, is_bulk: bool) -> int:
        """Returns the padded tokens of the sequences that go before a new sequence."""
        return self._tokens[0] + self._tokens[1] if is_bulk else self._tokens[0]

    def push(self, sequence: QueuedSequence) -> None:
        heaps = self._heaps[sequence.is_bulk]
        heap = heaps.get(sequence.padded_tokens)
        if heap is None:
            heap = heaps[sequence.padded_tokens] = _Heap()
        heapq.heappush(heap.entries, sequence)
        heap.waiting += 1
        sequence.is_waiting = True
        self._rows += sequence.rows
        self._tokens[sequence.is_bulk] += sequence.rows * sequence.padded_tokens

    def oldest(self) -> QueuedSequence | None:
        """Returns the interactive sequence of lowest rank, or else the bulk sequence of lowest rank."""
        for heaps in self._heaps:
            if heaps:
                return min(heap.entries[0] for heap in heaps.values())
        return None

    def lengths(self, *, is_bulk: bool) -> Iterable[int]:
        return self._heaps[is_bulk].keys()

    def nearest_lengths(self, tokens: int, *, is_bulk: bool) -> list[int]:
        """Returns the padded lengths of waiting sequences, nearest first."""
        return sorted(self.lengths(is_bulk=is_bulk), key=lambda length: (abs(length - tokens), length))

    def count_places(self, padded_tokens: int, *, is_bulk: bool) -> int:
        """Counts the places of a padded length, each with one waiting sequence or several."""
        heap = self._heaps[is_bulk].get(padded_tokens)
        return heap.waiting if heap else 0

    def first(self, padded_tokens: int, *, is_bulk: bool) -> QueuedSequence | None:
        """Returns the sequence of lowest rank of a padded length."""
        heap = self._heaps[is_bulk].get(padded_tokens)
        return heap.entries[0] if heap else None

    def remove(self, sequence: QueuedSequence) -> None:
        """Removes a waiting sequence at any position, in a short time, because its entry may stay in the heap."""
        heaps = self._heaps[sequence.is_bulk]
        heap = heaps[sequence.padded_tokens]
        sequence.is_waiting = False
        heap.waiting -= 1
        self._rows -= sequence.rows
        self._tokens[sequence.is_bulk] -= sequence.rows * sequence.padded_tokens
        if heap.waiting:
            heap.tidy()
        else:
            del heaps[sequence.padded_tokens]

    def forget(self, sequence: QueuedSequence) -> None:
        """Removes a sequence whose caller has left, and frees its arrays. Does nothing if it is not queued."""
        if sequence.is_waiting:
            self.remove(sequence)
            sequence.inputs = ()

    def expire_late(self) -> None:
        """Removes the sequences that would be too late."""
        for sequence in list(self):
            if sequence.expire_if_late(0):
                self.forget(sequence)


class _Heap:
    """The sequences of one padded length, and the number of entries that still wait."""

    __slots__ = ("entries", "waiting")

    def __init__(self) -> None:
        self.entries: list[QueuedSequence] = []
        self.waiting = 0

    def tidy(self) -> None:
        """Removes entries that no longer wait: at the front, and everywhere once they are many."""
        while not self.entries[0].is_waiting:
            heapq.heappop(self.entries)
        if len(self.entries) - self.waiting > max(self.waiting, _MAX_LEFT_BEHIND):
            self.entries = [entry for entry in self.entries if entry.is_waiting]
            heapq.heapify(self.entries)
