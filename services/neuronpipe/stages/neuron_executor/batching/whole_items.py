"""The batch policy for callers who make the batches themselves: the sequences of an item are one batch.

So the batches, and with them the last bits of the results, do not depend on what else waits and on how fast it is
computed. Offline work needs that (bulk/transform/).
"""

import math

from neuronpipe.stages.neuron_executor.batching.policy import Batch, BatchPolicy
from neuronpipe.stages.neuron_executor.batching.queue import QueuedSequence, SequenceQueue


class WholeItems:
    """See BatchPolicy. The shape of a batch is that of another policy."""

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
