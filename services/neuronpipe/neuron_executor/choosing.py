"""Which of the waiting sequences run together, and in which bucket.

A batch is the oldest sequence that is still wanted and others like it, as many as make the batch efficient. What its caller gave up, and
what would not be done by its deadline, is dropped on the way.
"""

import math
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from neuronpipe.core.buckets import Bucket, BucketPlan
from neuronpipe.neuron_executor.bucketing import best_bucket
from neuronpipe.neuron_executor.cores import Cores
from neuronpipe.neuron_executor.forecast import Forecast
from neuronpipe.neuron_executor.queue import SequenceQueue, Waiting

ResultT = TypeVar("ResultT")

# A batch is large enough once its overhead is this share of its time; beyond, more sequences only make each other wait.
_ENOUGH_OVERHEAD = 0.04
# Running lengths apart costs a batch's overhead more, running them together costs the padding, up to this share of the overhead: what is
# left behind may find nearer company. (Throughput with 32 callers hardly depends on it: between 1/20 and 1/3 it stayed within 1.5 %,
# while padding grew from 4.5 to 11 % of the tokens; twice as much cost 5 %.)
_WORTHWHILE_PADDING = 1 / 6
# For so long after a sequence came too late to be computed, those that could not wait for a full batch are dropped as well. The oldest
# are the most urgent, and each would have a batch of nearly its own: at twice the load that can be borne, a device with an overhead of
# 20 ms did 125 sequences a second instead of 700 (simulated 2026-11-21).
_LATE_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` counts padded tokens; one sequence alone may exceed it. Buckets limit their batches themselves."""

    max_batch_size: int
    max_batch_tokens: int
    max_queue_sequences: int


@dataclass(frozen=True, slots=True)
class Batch(Generic[ResultT]):
    """Sequences that run together; `bucket`: where the back end has buckets."""

    members: list[Waiting[ResultT]]
    bucket: Bucket | None

    @property
    def padded_tokens(self) -> int:
        """The length of each row."""
        return self.bucket.tokens if self.bucket else max(one.padded_tokens for one in self.members)

    @property
    def computed_tokens(self) -> int:
        """What the device computes, rows that stay empty included."""
        return self.bucket.padded_tokens if self.bucket else len(self.members) * self.padded_tokens


class BatchChooser(Generic[ResultT]):
    """Takes batches out of one model's queue."""

    def __init__(self, queue: SequenceQueue[ResultT], cores: Cores, forecast: Forecast, limits: Limits, plan: BucketPlan | None) -> None:
        self._queue = queue
        self._cores = cores
        self._forecast = forecast
        self._limits = limits
        self._plan = plan
        # Of interactive and of bulk sequences.
        self._late_until_s = [0.0, 0.0]

    def take(self, core: int) -> Batch[ResultT] | None:
        """The next batch for a core, or None where there is none for it."""
        wait_s = self._cores.busy_s(core)
        while oldest := self._queue.oldest():
            if oldest.lost_cores and not self._cores.is_idle(core):
                return None  # with nothing beside it, or nobody could tell which of the two a core was lost through
            self._queue.pop(oldest)
            if self._can_wait(oldest, wait_s):
                if oldest.lost_cores:
                    return self.of([oldest])
                return self._in_bucket(oldest, wait_s, self._plan) if self._plan else self._of_any_shape(oldest, wait_s)
        return None

    def of(self, members: list[Waiting[ResultT]]) -> Batch[ResultT]:
        """These sequences as a batch, in the smallest bucket that holds them."""
        longest = max(one.padded_tokens for one in members)
        return Batch(members, self._plan.find(len(members), longest) if self._plan else None)

    def _can_wait(self, one: Waiting[ResultT], wait_s: float) -> bool:
        """Whether someone waits for a sequence, and still will when it has been computed by a core that is free in `wait_s`."""
        if one.future.done():
            return False
        if not one.is_wanted(wait_s + self._forecast.alone_s(one.padded_tokens)):
            self._late_until_s[one.is_bulk] = time.monotonic() + _LATE_FOR_S
            return False
        if time.monotonic() >= self._late_until_s[one.is_bulk]:
            return True
        return one.is_wanted(wait_s + self._forecast.batch_s(self._full_tokens(one)))

    def _full_tokens(self, one: Waiting[ResultT]) -> int:
        """What the device computes for a batch as large as is worth it, as far as what waits fills it."""
        waiting_tokens = one.padded_tokens + self._queue.tokens_before(is_bulk=one.is_bulk)
        if self._plan:
            rows = -(-waiting_tokens // one.padded_tokens)
            return best_bucket(self._plan.buckets, [(one.padded_tokens, rows)], self._forecast.batch_s, math.inf).padded_tokens
        return int(min(waiting_tokens, self._enough_tokens, one.padded_tokens * self._limits.max_batch_size))

    @property
    def _enough_tokens(self) -> float:
        """A batch of so many padded tokens need not grow any more."""
        return min(self._forecast.overhead_tokens / _ENOUGH_OVERHEAD, self._limits.max_batch_tokens)

    def _in_bucket(self, oldest: Waiting[ResultT], wait_s: float, plan: BucketPlan) -> Batch[ResultT]:
        """Fills the bucket that does most work a second, with sequences of the oldest's length first, then with the longest that fit."""
        tokens, is_bulk = oldest.padded_tokens, oldest.is_bulk
        idle_cores = max(1, self._cores.idle)
        share = -(-(1 + self._queue.count(tokens, is_bulk=is_bulk)) // idle_cores)
        waiting = [(tokens, share)]
        if idle_cores == 1:  # else an idle core computes those of other lengths sooner
            others = sorted((length for length in self._queue.lengths(is_bulk=is_bulk) if length != tokens), reverse=True)
            waiting += [(length, self._queue.count(length, is_bulk=is_bulk)) for length in others]
        begin_s = time.monotonic() + wait_s
        bucket = best_bucket(plan.buckets, waiting, self._forecast.batch_s, oldest.deadline_s - begin_s)
        finish_s = begin_s + self._forecast.batch_s(bucket.padded_tokens)
        members = [oldest]
        for length, _ in waiting:
            most = min(bucket.batch, share) if length == tokens else bucket.batch
            while length <= bucket.tokens and len(members) < most and (one := self._queue.first(length, is_bulk=is_bulk)):
                if not self._can_wait(one, wait_s):
                    self._queue.pop(one)
                elif one.lost_cores or finish_s >= one.deadline_s:
                    break
                else:
                    self._queue.pop(one)
                    members.append(one)
        return self.of(members)

    def _of_any_shape(self, oldest: Waiting[ResultT], wait_s: float) -> Batch[ResultT]:
        """Takes the nearest lengths first."""
        members = [oldest]
        for length in self._queue.near(oldest.padded_tokens, is_bulk=oldest.is_bulk):
            if not self._fill(members, length, wait_s):
                break
        return self.of(members)

    def _fill(self, members: list[Waiting[ResultT]], length: int, wait_s: float) -> bool:
        """Adds waiting sequences of a padded length while that pays. Returns whether the batch can still grow."""
        overhead_tokens = self._forecast.overhead_tokens
        # A share for every idle core, or one would work and the others watch.
        own_tokens = sum(one.padded_tokens for one in members)
        share = (self._queue.tokens_before(is_bulk=True) + own_tokens) / max(1, self._cores.idle)
        padded = max(one.padded_tokens for one in members)
        earliest_s = min(one.deadline_s for one in members)
        padding = 0
        while one := self._queue.first(length, is_bulk=members[0].is_bulk):
            if not self._can_wait(one, wait_s):  # or it would keep those behind it out of the batch
                self._queue.pop(one)
                continue
            if one.lost_cores:
                return True
            new_padded = max(padded, length)
            tokens = new_padded * (len(members) + 1)
            if len(members) == self._limits.max_batch_size or own_tokens >= share or padded * len(members) >= self._enough_tokens:
                return False
            padding += tokens - padded * len(members) - length
            finish_s = time.monotonic() + wait_s + self._forecast.batch_s(tokens)
            if (
                tokens > self._limits.max_batch_tokens
                or padding > overhead_tokens * _WORTHWHILE_PADDING
                or finish_s >= min(earliest_s, one.deadline_s)
            ):
                return True
            self._queue.pop(one)
            members.append(one)
            own_tokens += length
            padded, earliest_s = new_padded, min(earliest_s, one.deadline_s)
        return True
