"""The batch policy for back ends that compute the shapes of buckets only.

It fills the bucket that does the most work a second.
"""

import math
import time
from collections.abc import Callable, Sequence

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.stages.neuron_executor.batching.forecast import Forecast
from neuronpipe.stages.neuron_executor.batching.policy import Batch, DeadlineCheck
from neuronpipe.stages.neuron_executor.batching.queue import QueuedSequence, SequenceQueue


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
