"""Forms batches: which of a model's waiting sequences run together, in which shape.

FixedBuckets is for a few shapes that were compiled ahead. It fills the bucket that does the most work per second.
PlannedShapes is for a menu of many shapes. Sequences of different lengths share a batch while their padding costs less
than a separate batch.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.stages.neuron_executor.forecast import Forecast
from neuronpipe.stages.neuron_executor.sequence_queue import QueuedSequence, SequenceQueue
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu

# For this time after a sequence was too late, sequences that cannot wait for a full batch are also dropped. The oldest
# sequences are the most urgent, and each would run in a nearly empty batch: a device with an overhead of 20 ms at twice
# its load computed 125 sequences per second instead of 700 (simulated 2026-11-21).
_LATE_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a model. `max_batch_tokens` counts padded tokens, and does not limit a sequence alone.

    Buckets limit their batches themselves.
    """

    max_batch_size: int
    max_batch_tokens: int
    max_queue_sequences: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together, each padded to `padded_tokens`.

    `rows`: rows that the back end is given, the last of which may be unused. `computed_tokens`: tokens of all rows that
    the back end computes, including rows that it adds to fill a bucket.
    """

    members: list[QueuedSequence]
    rows: int
    padded_tokens: int
    computed_tokens: int

    @property
    def is_bulk(self) -> bool:
        return self.members[0].is_bulk


class BatchPolicy(Protocol):
    """Forms batches from the queue of one model. `deadlines`: finds the sequences that would be too late."""

    deadlines: "DeadlineCheck"

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """Makes a batch of a sequence that was already removed from the queue, and of others, which it removes.

        - `wait_s`: time until the batch begins.
        - `idle_cores`: number of cores that can share the queue, at least 1, with the core of this batch.
        - `limit_s`: a batch that would take longer does not grow.

        Sequences that would be too late are dropped.
        """

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """Makes a batch of exactly these sequences."""

    def lone_tokens(self, padded_tokens: int) -> int:
        """Returns the number of tokens that the device computes for a batch of one sequence of a padded length."""


class DeadlineCheck:
    """Drops the sequences of one model that would be too late.

    `lone_tokens`: see BatchPolicy. `full_tokens`: returns the tokens that the device computes for a full batch with the
    given sequence. A full batch need not grow, or contains all waiting sequences.
    """

    def __init__(
        self, forecast: Forecast, lone_tokens: Callable[[int], int], full_tokens: Callable[[QueuedSequence], int]
    ) -> None:
        self._forecast = forecast
        self._lone_tokens = lone_tokens
        self._full_tokens = full_tokens
        # Until these times, interactive and bulk sequences are dropped if a full batch would be too late for them.
        self._late_until_s = [0.0, 0.0]

    def expire_if_late(self, sequence: QueuedSequence, wait_s: float) -> bool:
        """Expires the sequence unless a core that is free in `wait_s` computes it in time.

        Returns whether no caller waits for the result now.
        """
        if sequence.future.done():
            return True
        own_tokens = sequence.rows * self._lone_tokens(sequence.padded_tokens)
        if sequence.expire_if_late(wait_s + self._forecast.next_batch_s(own_tokens)):
            self._late_until_s[sequence.is_bulk] = time.monotonic() + _LATE_FOR_S
            return True
        if time.monotonic() >= self._late_until_s[sequence.is_bulk]:
            return False
        return sequence.expire_if_late(wait_s + self._forecast.batch_s(self._full_tokens(sequence)))


class FixedBuckets:
    """Batches of the buckets that were compiled ahead; see BatchPolicy."""

    def __init__(self, queue: SequenceQueue, forecast: Forecast, plan: BucketPlan) -> None:
        self._queue = queue
        self._forecast = forecast
        self._plan = plan
        self.deadlines = DeadlineCheck(forecast, self.lone_tokens, self._full_tokens)

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """Takes sequences of the oldest's length first, then the longest that fit; see BatchPolicy."""
        tokens, is_bulk = oldest.padded_tokens, oldest.is_bulk
        share = -(-(1 + self._queue.count_places(tokens, is_bulk=is_bulk)) // idle_cores)
        waiting = [(tokens, share)]
        if idle_cores == 1:  # otherwise an idle core computes sequences of other lengths sooner
            lengths = sorted(self._queue.lengths(is_bulk=is_bulk), reverse=True)
            others = [length for length in lengths if length != tokens]
            waiting += [(length, self._queue.count_places(length, is_bulk=is_bulk)) for length in others]
        begin_s = time.monotonic() + wait_s
        time_left_s = oldest.deadline_s - begin_s
        bucket = best_bucket(self._plan.buckets, waiting, self._forecast.batch_s, min(limit_s, time_left_s))
        finish_s = begin_s + self._forecast.batch_s(bucket.padded_tokens)
        members = [oldest]
        for length, _ in waiting:
            if length > bucket.tokens:
                continue
            max_rows = min(bucket.batch, share) if length == tokens else bucket.batch
            while len(members) < max_rows and (head := self._queue.first(length, is_bulk=is_bulk)):
                if self.deadlines.expire_if_late(head, wait_s):
                    self._queue.forget(head)
                elif head.lost_cores or finish_s >= head.deadline_s:
                    break
                else:
                    self._queue.remove(head)
                    members.append(head)
        return self.batch_of(members)

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """Uses the smallest bucket that holds the sequences; see BatchPolicy."""
        bucket = self._smallest(len(members), max(member.padded_tokens for member in members))
        return Batch(members, len(members), bucket.tokens, bucket.padded_tokens)

    def lone_tokens(self, padded_tokens: int) -> int:
        return self._smallest(1, padded_tokens).padded_tokens

    def _smallest(self, rows: int, tokens: int) -> Bucket:
        bucket = self._plan.find(rows, tokens)
        assert bucket  # noqa: S101 (padded lengths are those of buckets)
        return bucket

    def _full_tokens(self, sequence: QueuedSequence) -> int:
        waiting_tokens = sequence.padded_tokens + self._queue.tokens_before(is_bulk=sequence.is_bulk)
        rows = -(-waiting_tokens // sequence.padded_tokens)
        return best_bucket(
            self._plan.buckets, [(sequence.padded_tokens, rows)], self._forecast.batch_s, math.inf
        ).padded_tokens


def best_bucket(
    buckets: Sequence[Bucket], waiting: Sequence[tuple[int, int]], batch_s: Callable[[int], float], limit_s: float
) -> Bucket:
    """Finds the bucket that does the most work per second with the waiting sequences. A tie goes to the fewest tokens.

    `waiting`: (padded length, number of sequences) in the order in which they would be taken; the bucket must hold the
    first length. `batch_s`: the time to compute a number of tokens, or 0 if it is not known; then the bucket with the
    most filled rows wins. Buckets that would take longer than `limit_s` are omitted, except the smallest.

    A bucket takes the same time for any number of used rows. The work of a sequence is its cost in the bucket that is
    best for sequences of its length alone. So a long bucket is not chosen for rows of short sequences.
    """
    timed = [(bucket, batch_s(bucket.padded_tokens)) for bucket in buckets]
    fitting = [(bucket, time_s) for bucket, time_s in timed if bucket.tokens >= waiting[0][0]]
    smallest = min(fitting, key=lambda candidate: candidate[0].padded_tokens)
    in_time = [(bucket, time_s) for bucket, time_s in fitting if time_s < limit_s] or [smallest]
    if len(in_time) == 1:
        return in_time[0][0]
    row_cost_s = {
        length: min((time_s or 1) / min(bucket.batch, count) for bucket, time_s in timed if bucket.tokens >= length)
        for length, count in waiting
    }

    def work_per_second(candidate: tuple[Bucket, float]) -> tuple[float, int]:
        bucket, time_s = candidate
        free_rows, work_s = bucket.batch, 0.0
        for length, count in waiting:
            if length <= bucket.tokens:
                rows = min(free_rows, count)
                work_s += rows * row_cost_s[length]
                free_rows -= rows
        return round(work_s / (time_s or 1), 9), -bucket.padded_tokens

    return max(in_time, key=work_per_second)[0]


# A batch is efficient once its overhead is at most this share of its time. More sequences would only delay it.
_EFFICIENT_OVERHEAD = 0.04
# Different lengths cost the overhead of another batch if they run separately, and padding if they run together. Padding
# is accepted up to this share of the overhead, because a sequence that is omitted may find a batch of a nearer length.
# (Throughput with 32 callers hardly depends on it: between 1/20 and 1/3 it stayed within 1.5 %, while padding grew from
# 4.5 to 11 % of the tokens. Twice the upper value cost 5 %.)
_WORTHWHILE_PADDING = 1 / 6


class PlannedShapes:
    """Batches of the shapes on a menu; see BatchPolicy."""

    def __init__(self, queue: SequenceQueue, forecast: Forecast, menu: ShapeMenu, limits: Limits) -> None:
        self._queue = queue
        self._forecast = forecast
        self._menu = menu
        self._limits = limits
        self.deadlines = DeadlineCheck(forecast, self.lone_tokens, self._full_tokens)

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """Takes the nearest lengths first, and gives back sequences that fill no batch of the menu; see BatchPolicy."""
        growing = _GrowingBatch(oldest)
        for length in self._queue.nearest_lengths(oldest.padded_tokens, is_bulk=oldest.is_bulk):
            if self._menu.can_share_batch(oldest.padded_tokens, length) and not self._add(
                growing, length, wait_s, idle_cores, limit_s
            ):
                break
        members = growing.members
        while len(members) > 1:
            rows = sum([member.rows for member in members])
            if self._menu.rows_within(rows, max(member.padded_tokens for member in members)) == rows:
                break
            self._queue.push(members.pop())
        return self.batch_of(members)

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """Adds empty rows if the number of sequences is not on the menu; see BatchPolicy."""
        longest = max(member.padded_tokens for member in members)
        rows = self._menu.rows_for(sum([member.rows for member in members]), longest)
        return Batch(members, rows, longest, rows * longest)

    def lone_tokens(self, padded_tokens: int) -> int:
        return padded_tokens

    def _full_tokens(self, sequence: QueuedSequence) -> int:
        waiting_tokens = sequence.rows * sequence.padded_tokens + self._queue.tokens_before(is_bulk=sequence.is_bulk)
        return int(min(waiting_tokens, self._efficient_tokens, sequence.padded_tokens * self._limits.max_batch_size))

    @property
    def _efficient_tokens(self) -> float:
        """The number of padded tokens from which a batch need not grow."""
        return min(self._forecast.overhead_tokens / _EFFICIENT_OVERHEAD, self._limits.max_batch_tokens)

    def _add(self, growing: "_GrowingBatch", length: int, wait_s: float, idle_cores: int, limit_s: float) -> bool:
        """Adds waiting sequences of a padded length while that saves time. Returns whether the batch can still grow."""
        members = growing.members
        # Each idle core gets a share. Otherwise one core would work while the others are idle.
        share = (self._queue.tokens_before(is_bulk=True) + growing.tokens) / idle_cores
        padding = 0
        while head := self._queue.first(length, is_bulk=members[0].is_bulk):
            if self.deadlines.expire_if_late(head, wait_s):  # late sequences keep those behind out of the batch
                self._queue.forget(head)
                continue
            if head.lost_cores:
                return True
            now_tokens, rows = growing.padded_tokens * growing.rows, growing.rows + head.rows
            if (
                rows > min(self._limits.max_batch_size, self._menu.most_rows(growing.padded_tokens))
                or growing.tokens >= share
                or now_tokens >= self._efficient_tokens
            ):
                return False
            padded = max(growing.padded_tokens, length)
            tokens = padded * rows
            padding += tokens - now_tokens - length * head.rows
            batch_s = self._forecast.batch_s(tokens)
            finish_s = time.monotonic() + wait_s + batch_s
            if (
                batch_s > limit_s
                or tokens > self._limits.max_batch_tokens
                or rows > self._menu.most_rows(padded)
                or padding > self._forecast.overhead_tokens * _WORTHWHILE_PADDING
                or finish_s >= growing.deadline_s
                or finish_s >= head.deadline_s
            ):
                return True
            self._queue.remove(head)
            growing.add(head)
        return True


class _GrowingBatch:
    """A batch that may still grow: its members, their rows and padded tokens together, the length to which all are
    padded, and the earliest of their deadlines.
    """

    __slots__ = ("deadline_s", "members", "padded_tokens", "rows", "tokens")

    def __init__(self, oldest: QueuedSequence) -> None:
        self.members = [oldest]
        self.rows, self.padded_tokens = oldest.rows, oldest.padded_tokens
        self.tokens = oldest.rows * oldest.padded_tokens
        self.deadline_s = oldest.deadline_s

    def add(self, sequence: QueuedSequence) -> None:
        """Adds a sequence that has left the queue."""
        self.members.append(sequence)
        self.rows += sequence.rows
        self.tokens += sequence.rows * sequence.padded_tokens
        self.padded_tokens = max(self.padded_tokens, sequence.padded_tokens)
        self.deadline_s = min(self.deadline_s, sequence.deadline_s)
