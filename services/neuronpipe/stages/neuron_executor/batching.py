"""Forms batches: which of a model's waiting sequences run together, in which shape.

FixedBuckets is for back ends that compute the shapes of buckets only: it fills the bucket that does the most work a
second. FreeShapes is for back ends that compute any shape: sequences of different lengths share a batch while their
padding costs less than a separate batch. WholeItems is for callers who make the batches themselves.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.stages.neuron_executor.forecast import Forecast, QueuedSequence, SequenceQueue

# For this time after a sequence was too late to be computed, sequences that cannot wait for a full batch are dropped,
# too. The oldest are the most urgent, and each would run in a nearly empty batch: at twice the load that a device with
# an overhead of 20 ms can take, it did 125 sequences a second instead of 700 (simulated 2026-11-21).
_LATE_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` counts padded tokens; one sequence alone may exceed it. Buckets limit their own batches."""

    max_batch_size: int
    max_batch_tokens: int
    max_queue_sequences: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together, each padded to `padded_tokens`; `computed_tokens`: of all rows, also empty ones."""

    members: list[QueuedSequence]
    padded_tokens: int
    computed_tokens: int


class BatchPolicy(Protocol):
    """Forms batches from the queue of one model."""

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """Makes a batch of a sequence that was already taken out of the queue, and of others, which this takes out.

        The batch begins in `wait_s`. `idle_cores` is the number of cores that can share the queue, at least 1,
        including the one for this batch. The batch does not grow to one that takes longer than `limit_s`. Sequences
        that would be too late are dropped.
        """

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """Makes a batch of exactly these sequences."""

    def lone_tokens(self, padded_tokens: int) -> int:
        """The number of tokens that the device computes for a sequence of that padded length in a batch of its own."""

    def can_wait(self, one: QueuedSequence, wait_s: float) -> bool:
        """Whether a caller still waits when a core that is free in `wait_s` has computed it; if not, it expires."""


class DeadlineCheck:
    """Drops sequences of one model that would be too late.

    `lone_tokens`: see BatchPolicy. `full_tokens`: the number of tokens that the device computes for a batch with this
    sequence that need not grow, or that holds all waiting sequences.
    """

    def __init__(
        self, forecast: Forecast, lone_tokens: Callable[[int], int], full_tokens: Callable[[QueuedSequence], int]
    ) -> None:
        self._forecast = forecast
        self._lone_tokens = lone_tokens
        self._full_tokens = full_tokens
        # For interactive and for bulk sequences.
        self._late_until_s = [0.0, 0.0]

    def can_wait(self, one: QueuedSequence, wait_s: float) -> bool:
        """See BatchPolicy."""
        if one.future.done():
            return False
        if not one.is_wanted(wait_s + self._forecast.alone_s(self._lone_tokens(one.padded_tokens))):
            self._late_until_s[one.is_bulk] = time.monotonic() + _LATE_FOR_S
            return False
        if time.monotonic() >= self._late_until_s[one.is_bulk]:
            return True
        return one.is_wanted(wait_s + self._forecast.batch_s(self._full_tokens(one)))


class FixedBuckets:
    """See BatchPolicy."""

    def __init__(self, queue: SequenceQueue, forecast: Forecast, plan: BucketPlan) -> None:
        self._queue = queue
        self._forecast = forecast
        self._plan = plan
        self.can_wait = DeadlineCheck(forecast, self.lone_tokens, self._full_tokens).can_wait

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """See BatchPolicy. Takes sequences of the oldest's length first, then the longest that fit."""
        tokens, is_bulk = oldest.padded_tokens, oldest.is_bulk
        share = -(-(1 + self._queue.count(tokens, is_bulk=is_bulk)) // idle_cores)
        waiting = [(tokens, share)]
        if idle_cores == 1:  # otherwise an idle core computes sequences of other lengths sooner
            others = sorted(
                (length for length in self._queue.lengths(is_bulk=is_bulk) if length != tokens), reverse=True
            )
            waiting += [(length, self._queue.count(length, is_bulk=is_bulk)) for length in others]
        begin_s = time.monotonic() + wait_s
        room_s = min(limit_s, oldest.deadline_s - begin_s)
        bucket = best_bucket(self._plan.buckets, waiting, self._forecast.batch_s, room_s)
        finish_s = begin_s + self._forecast.batch_s(bucket.padded_tokens)
        members = [oldest]
        for length, _ in waiting:
            most = min(bucket.batch, share) if length == tokens else bucket.batch
            while (
                length <= bucket.tokens and len(members) < most and (one := self._queue.first(length, is_bulk=is_bulk))
            ):
                if not self.can_wait(one, wait_s):
                    self._queue.forget(one)
                elif one.lost_cores or finish_s >= one.deadline_s:
                    break
                else:
                    self._queue.remove(one)
                    members.append(one)
        return self.batch_of(members)

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """See BatchPolicy. The bucket is the smallest one that holds the sequences."""
        bucket = self._smallest(len(members), max(one.padded_tokens for one in members))
        return Batch(members, bucket.tokens, bucket.padded_tokens)

    def lone_tokens(self, padded_tokens: int) -> int:
        return self._smallest(1, padded_tokens).padded_tokens

    def _smallest(self, rows: int, tokens: int) -> Bucket:
        bucket = self._plan.find(rows, tokens)
        assert bucket  # noqa: S101 (padded lengths are those of buckets)
        return bucket

    def _full_tokens(self, one: QueuedSequence) -> int:
        waiting_tokens = one.padded_tokens + self._queue.tokens_before(is_bulk=one.is_bulk)
        rows = -(-waiting_tokens // one.padded_tokens)
        return best_bucket(
            self._plan.buckets, [(one.padded_tokens, rows)], self._forecast.batch_s, math.inf
        ).padded_tokens


def best_bucket(
    buckets: Sequence[Bucket], waiting: Sequence[tuple[int, int]], seconds: Callable[[int], float], room_s: float
) -> Bucket:
    """The bucket that does the most work a second with the waiting sequences; of equals, the one with fewest tokens.

    `waiting`: padded lengths and the number of sequences of each, in the order in which they would be taken; the bucket
    must hold the first. `seconds`: the time to compute a number of tokens; 0 if not known, and then the bucket with the
    most filled rows wins. Buckets that would take longer than `room_s` are left out, except the smallest.

    A bucket takes the same time however many of its rows are used. The work of a sequence is its cost in the bucket
    that is best for sequences of its length alone. So a long bucket is not chosen for rows of short sequences.
    """
    timed = [(bucket, seconds(bucket.padded_tokens)) for bucket in buckets]
    fitting = [one for one in timed if one[0].tokens >= waiting[0][0]]
    in_time = [one for one in fitting if one[1] < room_s] or [min(fitting, key=lambda one: one[0].padded_tokens)]
    if len(in_time) == 1:
        return in_time[0][0]
    worth = {
        length: min((time_s or 1) / min(bucket.batch, count) for bucket, time_s in timed if bucket.tokens >= length)
        for length, count in waiting
    }

    def order(one: tuple[Bucket, float]) -> tuple[float, int]:
        bucket, time_s = one
        room, work_s = bucket.batch, 0.0
        for length, count in waiting:
            if length <= bucket.tokens:
                rows = min(room, count)
                work_s += rows * worth[length]
                room -= rows
        return round(work_s / (time_s or 1), 9), -bucket.padded_tokens

    return max(in_time, key=order)[0]


# A batch is large enough once its overhead is this share of its time. More sequences would only delay each other.
_ENOUGH_OVERHEAD = 0.04
# Different lengths in separate batches cost the overhead of one more batch; together, they cost padding. Padding is
# accepted up to this share of the overhead, because a sequence that is left out may find a batch of a nearer length.
# (Throughput with 32 callers hardly depends on it: between 1/20 and 1/3 it stayed within 1.5 %, while padding grew from
# 4.5 to 11 % of the tokens; twice as much cost 5 %.)
_WORTHWHILE_PADDING = 1 / 6


class FreeShapes:
    """See BatchPolicy."""

    def __init__(self, queue: SequenceQueue, forecast: Forecast, limits: Limits) -> None:
        self._queue = queue
        self._forecast = forecast
        self._limits = limits
        self.can_wait = DeadlineCheck(forecast, self.lone_tokens, self._full_tokens).can_wait

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """See BatchPolicy. Takes the nearest lengths first."""
        members = [oldest]
        for length in self._queue.near(oldest.padded_tokens, is_bulk=oldest.is_bulk):
            if not self._add(members, length, wait_s, idle_cores, limit_s):
                break
        return self.batch_of(members)

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        longest = max(one.padded_tokens for one in members)
        return Batch(members, longest, len(members) * longest)

    def lone_tokens(self, padded_tokens: int) -> int:
        return padded_tokens

    def _full_tokens(self, one: QueuedSequence) -> int:
        waiting_tokens = one.padded_tokens + self._queue.tokens_before(is_bulk=one.is_bulk)
        return int(min(waiting_tokens, self._enough_tokens, one.padded_tokens * self._limits.max_batch_size))

    @property
    def _enough_tokens(self) -> float:
        """The number of padded tokens from which a batch need not grow."""
        return min(self._forecast.overhead_tokens / _ENOUGH_OVERHEAD, self._limits.max_batch_tokens)

    def _add(self, members: list[QueuedSequence], length: int, wait_s: float, idle_cores: int, limit_s: float) -> bool:
        """Adds waiting sequences of a padded length while that saves time. Returns whether the batch can still grow."""
        overhead_tokens = self._forecast.overhead_tokens
        # Each idle core gets a share. Otherwise one would work while the others are idle.
        own_tokens = sum(one.padded_tokens for one in members)
        share = (self._queue.tokens_before(is_bulk=True) + own_tokens) / idle_cores
        padded = max(one.padded_tokens for one in members)
        earliest_s = min(one.deadline_s for one in members)
        padding = 0
        while one := self._queue.first(length, is_bulk=members[0].is_bulk):
            if not self.can_wait(one, wait_s):  # otherwise it would keep those behind it out of the batch
                self._queue.forget(one)
                continue
            if one.lost_cores:
                return True
            new_padded = max(padded, length)
            tokens = new_padded * (len(members) + 1)
            if (
                len(members) == self._limits.max_batch_size
                or own_tokens >= share
                or padded * len(members) >= self._enough_tokens
            ):
                return False
            padding += tokens - padded * len(members) - length
            batch_s = self._forecast.batch_s(tokens)
            finish_s = time.monotonic() + wait_s + batch_s
            if (
                batch_s > limit_s
                or tokens > self._limits.max_batch_tokens
                or padding > overhead_tokens * _WORTHWHILE_PADDING
                or finish_s >= min(earliest_s, one.deadline_s)
            ):
                return True
            self._queue.remove(one)
            members.append(one)
            own_tokens += length
            padded, earliest_s = new_padded, min(earliest_s, one.deadline_s)
        return True


class WholeItems:
    """See BatchPolicy. The shape of a batch is that of another policy.

    The sequences of an item are one batch. So the batches, and with them the last bits of the results, do not depend on
    what else waits and on how fast it is computed. Offline work needs that (bulk/transform/).
    """

    def __init__(self, queue: SequenceQueue, shapes: BatchPolicy) -> None:
        self._queue = queue
        self.batch_of = shapes.batch_of
        self.lone_tokens = shapes.lone_tokens
        self.can_wait = shapes.can_wait

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """See BatchPolicy. Takes what waits of the oldest's item."""
        others = [one for one in oldest.mates if one.is_waiting]
        for one in others:
            self._queue.remove(one)
        return self.batch_of([oldest, *others])
