"""How long batches will take, and what waits for them."""

import time
from typing import Any

from neuronpipe.core.buckets import BucketPlan
from neuronpipe.neuron_executor.batch_time import BatchTime
from neuronpipe.neuron_executor.cores import Cores
from neuronpipe.neuron_executor.queue import SequenceQueue

# Where no batch runs or has run for so long, how long one takes is to be found out again: or a machine that was slow for a while would
# refuse every deadline for ever.
_ESTIMATE_LIFE_S = 1.0


class Forecast:
    """One model's. Times are those of a core: from when it is free for a batch to the batch's end."""

    def __init__(
        self, queue: SequenceQueue[Any], cores: Cores, plan: BucketPlan | None, batch_time: BatchTime, lone_batch_time: BatchTime
    ) -> None:
        """`lone_batch_time`: of batches that run while the other cores have nothing to do."""
        self._queue = queue
        self._cores = cores
        self._plan = plan
        self._batch_time = batch_time
        self._lone_batch_time = lone_batch_time
        self._last_batch_s = time.monotonic()

    @property
    def overhead_tokens(self) -> float:
        """How many tokens take as long as a batch's overhead."""
        return self._batch_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        """A batch has run."""
        self._last_batch_s = time.monotonic()
        (self._lone_batch_time if is_alone else self._batch_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """How long a batch takes beside others; 0 where nothing is known."""
        return self._batch_time.seconds(computed_tokens)

    def alone_s(self, padded_tokens: int) -> float:
        """How long a sequence takes in a batch of its own, as far as is known."""
        is_idle = not self._cores.running
        if is_idle and time.monotonic() >= self._last_batch_s + _ESTIMATE_LIFE_S:
            return 0.0
        batch_time = self._lone_batch_time if is_idle and not len(self._queue) else self._batch_time
        bucket = self._plan.find(1, padded_tokens) if self._plan else None
        return batch_time.seconds(bucket.padded_tokens if bucket else padded_tokens)

    def queue_s(self, *, is_bulk: bool) -> float:
        """How long what waits already keeps the cores busy, which a new sequence waits at least.

        However many batches a core is handed, it computes one at a time, and a batch's time is counted so.
        """
        return self._queue.tokens_before(is_bulk=is_bulk) * self._batch_time.token_s / max(1, self._cores.left)
