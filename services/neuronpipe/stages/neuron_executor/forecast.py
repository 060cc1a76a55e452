"""Forecasts when a model's next sequence is computed: the queue of what waits, and how long batches take."""

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
    itself included, where they are computed in one batch (WholeItems). `lost_cores` counts the cores that were lost
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


# The weight that older batches keep with each new one: the estimate follows the last fifty or so.
_DECAY = 0.98
# The weight of one measurement of the warm-up, and the weight to which it decays, more slowly than that of batches. It
# separates the two costs if the load has a single length, and is soon outweighed if it was taken at a bad moment.
_ANCHOR_WEIGHT, _LEAST_ANCHOR_WEIGHT, _ANCHOR_DECAY = 2.0, 0.02, 0.99
# The lower bound of the overhead, so that noise does not keep sequences apart.
_MIN_OVERHEAD_TOKENS = 4.0
# The lower bound of the assumed error of estimates.
_MIN_DEVIATION = 0.05
# A batch counts as at most this many times its forecast, so that a stall (a paused machine, a new kernel) is soon
# forgotten. A machine that has become slower is still followed, because the forecast grows with every batch.
_MAX_SURPRISE = 3.0


class BatchTime:
    """Models batch time as an overhead plus a cost for each padded token.

    It is fitted by least squares with exponential decay. On a CPU with two cores, a MiniLM in float32 takes 2.7 ms a
    batch and 0.26 ms a token (measured 2026-11-21).
    """

    def __init__(self) -> None:
        self._anchor = _Sums()
        self._recent = _Sums()
        self._deviation = 0.2
        self._overhead_s = 0.0
        # The seconds for a padded token; 0 if not known.
        self.token_s = 0.0

    def anchor(self, tokens: int, seconds: float) -> None:
        """Adds a measurement of the warm-up."""
        self._anchor.add(tokens, seconds, _ANCHOR_WEIGHT)
        self._fit()

    def observe(self, tokens: int, seconds: float) -> None:
        """Adds a batch of `tokens` padded tokens that took `seconds`."""
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
        """The number of tokens that take as long as a batch's overhead; infinite if a token's cost is 0 or unknown."""
        return max(_MIN_OVERHEAD_TOKENS, self._overhead_s / self.token_s) if self.token_s else math.inf

    def _fit(self) -> None:
        one, other = self._anchor, self._recent
        weight, x, y = one.weight + other.weight, one.x + other.x, one.y + other.y
        xx, xy = one.xx + other.xx, one.xy + other.xy
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        # Neither can be negative, whatever the noise.
        self.token_s = min(max(0.0, slope), y / x)
        self._overhead_s = max(0.0, (y - self.token_s * x) / weight)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The time of a batch while other batches run, and while the other cores are idle.

    With one core, these are the same.
    """

    beside: BatchTime
    alone: BatchTime


class _Sums:
    """The weighted sums for a least-squares fit of y to x."""

    __slots__ = ("weight", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def fade(self, share: float) -> None:
        """Multiplies the weight of all points so far."""
        self.weight *= share
        self.x *= share
        self.y *= share
        self.xx *= share
        self.xy *= share

    def add(self, x: float, y: float, weight: float) -> None:
        """Adds a point."""
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y


# After this time without a batch, or so many times a batch, the batch time is measured again. Otherwise a machine that
# was slow for a while would refuse every deadline for ever. Who is always late takes no more of a core than one in so
# many.
_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES = 1.0, 20.0


class Forecast:
    """The forecast of one model. Times are those of a core: from when it is free for a batch to the batch's end."""

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
        """The number of tokens that take as long as a batch's overhead."""
        return self._batch_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        """Adds the time of a batch that has run."""
        self._outdated_s = time.monotonic() + max(_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES * seconds)
        (self._lone_batch_time if is_alone else self._batch_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """The time of a batch while others run; 0 if not known."""
        return self._batch_time.seconds(computed_tokens)

    def alone_s(self, computed_tokens: int) -> float:
        """The time of the next batch if it has this few tokens, as far as known."""
        is_idle = not self._cores.running
        if is_idle and self._is_outdated():
            return 0.0
        is_alone = is_idle and not any(len(one._queue) for one in self._on_device)
        return (self._lone_batch_time if is_alone else self._batch_time).seconds(computed_tokens)

    def together_s(self, padded_tokens: int) -> float:
        """The least time for which a number of tokens keeps all cores busy, as far as known."""
        is_known = self._cores.running or not self._is_outdated()
        return padded_tokens * self._batch_time.token_s / max(1, self._cores.left) if is_known else 0.0

    def work_s(self) -> float:
        """The least time for which this model's waiting sequences keep all cores busy; 0 if not known."""
        return self._queue.tokens_before(is_bulk=True) * self._batch_time.token_s / max(1, self._cores.left)

    def queue_s(self, *, is_bulk: bool) -> float:
        """The least time that a new sequence waits.

        It is the time for which the waiting sequences of all models, and running batches of other models, keep the
        cores busy. A core computes one batch at a time, however many it has been given, and batch times are counted
        accordingly.
        """
        waiting_s = sum(one._queue.tokens_before(is_bulk=is_bulk) * one._batch_time.token_s for one in self._on_device)
        others_s = self._cores.busy_with_others_s(self) if len(self._on_device) > 1 else 0.0
        return others_s + waiting_s / max(1, self._cores.left)

    def _is_outdated(self) -> bool:
        return time.monotonic() >= self._outdated_s
