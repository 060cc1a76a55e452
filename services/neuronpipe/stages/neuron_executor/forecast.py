"""Forecasts when a model's next sequence is computed, from the queue of waiting sequences and the time of batches."""

import asyncio
import heapq
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.cores import Cores

# Entries without a waiting caller that may stay in a heap, or as many as there are waiting entries if that is more.
_MAX_LEFT_BEHIND = 16


@dataclass(slots=True)
class ComputedSequence:
    """The outputs of one sequence, and the batch in which it ran. Times are on time.monotonic_ns().

    `mates`: the outputs of the sequence's mates.
    """

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int
    mates: Sequence[Arrays] = ()


@dataclass(order=True, slots=True)
class QueuedSequence:
    """A sequence until its result is there, in the order of the queue.

    Sequences of tenants within their shares come first, then older sequences, and at the same age the sequence with the
    earliest deadline. `padded_tokens`: the length to which the back end pads it in a batch of its own. `deadline_s`: a
    time of time.monotonic(), infinite without a deadline. `trace`: the span context of its item if that is sampled.
    `lost_cores`: number of cores that were lost while they computed it. `mates`: other sequences of its item, which
    are not longer, have one place in the queue with it, run in its batch, and share its future.
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
    lost_cores: int = field(default=0, compare=False)
    is_waiting: bool = field(default=False, compare=False)
    mates: list[Arrays] = field(default_factory=list, compare=False)

    @property
    def rows(self) -> int:
        """The number of rows that it takes in a batch."""
        return 1 + len(self.mates)

    def keep_if_in_time(self, duration_s: float) -> bool:
        """Gives DeadlineExceeded to a caller who would get the result too late, in `duration_s`.

        Returns whether a caller still waits.
        """
        if self.future.done():
            return False
        if time.monotonic() + duration_s >= self.deadline_s:
            self.future.set_exception(DeadlineExceeded("the deadline would pass before the model has run"))
            return False
        return True


class SequenceQueue:
    """Waiting sequences. The model limits their number."""

    def __init__(self) -> None:
        # The heaps of interactive and of bulk sequences by padded length. No heap is empty; its first entry waits.
        self._heaps: tuple[dict[int, _Heap], dict[int, _Heap]] = ({}, {})
        self._count = 0
        # Padded tokens of interactive and of bulk sequences.
        self._tokens = [0, 0]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedSequence]:
        return (entry for heaps in self._heaps for heap in heaps.values() for entry in heap.entries if entry.is_waiting)

    def tokens_before(self, *, is_bulk: bool) -> int:
        """The padded tokens of the sequences that go before a new sequence."""
        return self._tokens[0] + self._tokens[1] if is_bulk else self._tokens[0]

    def push(self, sequence: QueuedSequence) -> None:
        heaps = self._heaps[sequence.is_bulk]
        heap = heaps.get(sequence.padded_tokens)
        if heap is None:
            heap = heaps[sequence.padded_tokens] = _Heap()
        heapq.heappush(heap.entries, sequence)
        heap.waiting += 1
        sequence.is_waiting = True
        self._count += sequence.rows
        self._tokens[sequence.is_bulk] += sequence.rows * sequence.padded_tokens

    def oldest(self) -> QueuedSequence | None:
        """The sequence that goes first: the oldest interactive sequence, or else the oldest bulk sequence."""
        for heaps in self._heaps:
            if heaps:
                return min(heap.entries[0] for heap in heaps.values())
        return None

    def lengths(self, *, is_bulk: bool) -> Iterable[int]:
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

    def remove(self, sequence: QueuedSequence) -> None:
        """Removes a waiting sequence at any position, in a short time, because its entry may stay in the heap."""
        heaps = self._heaps[sequence.is_bulk]
        heap = heaps[sequence.padded_tokens]
        sequence.is_waiting = False
        heap.waiting -= 1
        self._count -= sequence.rows
        self._tokens[sequence.is_bulk] -= sequence.rows * sequence.padded_tokens
        if heap.waiting:
            heap.tidy()
        else:
            del heaps[sequence.padded_tokens]

    def forget(self, sequence: QueuedSequence) -> None:
        """Removes a sequence without a waiting caller, with its arrays. Does nothing if the sequence is not queued."""
        if sequence.is_waiting:
            self.remove(sequence)
            sequence.arrays, sequence.mates = {}, []

    def forget_late(self) -> None:
        """Removes the sequences that would be too late."""
        for sequence in list(self):
            if not sequence.keep_if_in_time(0):
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


# The factor of the weight of older batches at each new batch: the estimate follows about the last 50 batches.
_DECAY = 0.98
# The weight of one measurement of the warm-up, the least weight to which it decays, and the factor per batch, which is
# slower than the decay of batches. The measurement separates the two costs if all load has one length, and recent
# batches soon outweigh a measurement at a bad moment.
_ANCHOR_WEIGHT, _LEAST_ANCHOR_WEIGHT, _ANCHOR_DECAY = 2.0, 0.02, 0.99
# The lower bound of the overhead, so that noise does not keep sequences apart.
_MIN_OVERHEAD_TOKENS = 4.0
# The lower bound of the assumed error of estimates.
_MIN_DEVIATION = 0.05
# A batch counts as at most this multiple of its forecast, so that a stall (a paused machine, a new kernel) is soon
# forgotten. The estimate still follows a machine that became slower, because the forecast grows with every batch.
_MAX_SURPRISE = 3.0


class BatchTime:
    """Models the time of a batch as an overhead plus a cost per padded token.

    Overhead and cost come from a least-squares fit with exponential decay. On a CPU with two cores, a batch of MiniLM
    in float32 takes 2.7 ms plus 0.26 ms per token (measured 2026-11-21).
    """

    def __init__(self) -> None:
        self._anchor = _Sums()
        self._recent = _Sums()
        self._deviation = 0.2
        self._overhead_s = 0.0
        # The seconds of a padded token; 0 if not known.
        self.token_s = 0.0

    def anchor(self, tokens: int, seconds: float) -> None:
        self._anchor.add(tokens, seconds, _ANCHOR_WEIGHT)
        self._fit()

    def observe(self, tokens: int, seconds: float) -> None:
        if expected := self._overhead_s + self.token_s * tokens:
            seconds = min(seconds, _MAX_SURPRISE * expected)
            error = min(1.0, abs(seconds - expected) / expected)
            self._deviation += (1 - _DECAY) * (error - self._deviation)
        self._recent.fade(_DECAY)
        self._recent.add(tokens, seconds, 1.0)
        if self._anchor.weight > _LEAST_ANCHOR_WEIGHT:
            self._anchor.fade(_ANCHOR_DECAY)
        self._fit()

    def seconds(self, tokens: int) -> float:
        """The likely upper bound of a batch's time: the estimate plus twice its usual error."""
        return (self._overhead_s + self.token_s * tokens) * (1 + 2 * max(_MIN_DEVIATION, self._deviation))

    @property
    def overhead_tokens(self) -> float:
        """Number of tokens that take as long as a batch's overhead; infinite if the cost of a token is not known."""
        return max(_MIN_OVERHEAD_TOKENS, self._overhead_s / self.token_s) if self.token_s else math.inf

    def _fit(self) -> None:
        anchor, recent = self._anchor, self._recent
        weight, x, y = anchor.weight + recent.weight, anchor.x + recent.x, anchor.y + recent.y
        xx, xy = anchor.xx + recent.xx, anchor.xy + recent.xy
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        # Neither cost can be negative, despite noise.
        self.token_s = min(max(0.0, slope), y / x)
        self._overhead_s = max(0.0, (y - self.token_s * x) / weight)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The time of a batch while other batches run, and while the other cores are idle. With one core both are equal."""

    beside: BatchTime
    alone: BatchTime


class _Sums:
    """The weighted sums for a least-squares fit of y to x."""

    __slots__ = ("weight", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def fade(self, share: float) -> None:
        self.weight *= share
        self.x *= share
        self.y *= share
        self.xx *= share
        self.xy *= share

    def add(self, x: float, y: float, weight: float) -> None:
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y


# The batch time is measured again after this time without a batch, or after this multiple of the time of a batch.
# Otherwise a machine that was slow for a while would refuse every deadline for ever. A caller that is always late takes
# at most one twentieth of a core.
_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES = 1.0, 20.0


class Forecast:
    """The forecast of one model. Times count from the moment when a core is free for a batch to the batch's end."""

    def __init__(
        self, queue: SequenceQueue, cores: Cores, times: BatchTimes, on_device: Collection["Forecast"]
    ) -> None:
        """`on_device`: the forecasts of all models of the device."""
        self._queue = queue
        self._cores = cores
        self._batch_time = times.beside
        self._lone_batch_time = times.alone
        self._on_device = on_device
        self._outdated_s = time.monotonic() + _ESTIMATE_LIFE_S

    @property
    def overhead_tokens(self) -> float:
        return self._batch_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        self._outdated_s = time.monotonic() + max(_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES * seconds)
        (self._lone_batch_time if is_alone else self._batch_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """The time of a batch while others run; 0 if not known."""
        return self._batch_time.seconds(computed_tokens)

    def alone_s(self, computed_tokens: int) -> float:
        """The time of the next batch if it has this number of tokens, as far as known."""
        if self._cores.running:
            return self._batch_time.seconds(computed_tokens)
        if self._is_outdated():
            return 0.0
        for model in self._on_device:
            if len(model._queue):
                return self._batch_time.seconds(computed_tokens)
        return self._lone_batch_time.seconds(computed_tokens)

    def together_s(self, padded_tokens: int) -> float:
        """The least time for which a number of tokens keeps all cores busy, as far as known."""
        is_known = self._cores.running or not self._is_outdated()
        return padded_tokens * self._batch_time.token_s / max(1, self._cores.left) if is_known else 0.0

    def work_s(self) -> float:
        """The least time for which this model's waiting sequences keep all cores busy; 0 if not known."""
        return self._queue.tokens_before(is_bulk=True) * self._batch_time.token_s / max(1, self._cores.left)

    def queue_s(self, *, is_bulk: bool) -> float:
        """The least time that a new sequence waits.

        The waiting sequences of all models, and running batches of other models, keep the cores busy for this time. A
        core computes one batch at a time, also if it was given several, and batch times are counted accordingly.
        """
        waiting_s = 0.0
        for model in self._on_device:
            waiting_s += model._queue.tokens_before(is_bulk=is_bulk) * model._batch_time.token_s
        others_s = self._cores.busy_with_others_s(self) if len(self._on_device) > 1 else 0.0
        return others_s + waiting_s / max(1, self._cores.left)

    def _is_outdated(self) -> bool:
        return time.monotonic() >= self._outdated_s
