"""The batch policy for back ends that compute any shape.

Sequences of different lengths share a batch while their padding costs less than a separate batch.
"""

import math
import time

from neuronpipe.stages.neuron_executor.batching.forecast import Forecast
from neuronpipe.stages.neuron_executor.batching.policy import Batch, DeadlineCheck, Limits
from neuronpipe.stages.neuron_executor.batching.queue import QueuedSequence, SequenceQueue

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
