"""The executor's models for a transform, which compute all sequences of an item in one batch on one core's threads.

So the bits of an item's results depend neither on other waiting items nor on the speed of computation.
"""

import math
from collections.abc import Sequence
from functools import partial

from neuronpipe.core.calls import Call
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.batching import Batch, BatchPolicy
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.sequence_queue import QueuedSequence, SequenceQueue
from neuronpipe.stages.neuron_executor.shapes import BatchShape


class WholeItemModel(ExecutorModel):
    """A model that keeps items whole. No shape is prepared, because items have other shapes than the menu plans."""

    may_use_all_cores = False
    policy: "WholeItems"

    def batch_policy(self) -> "WholeItems":
        return WholeItems(super().batch_policy(), self.queue)

    def enqueue(
        self, sequences: Sequence[Arrays], call: Call, trace: SpanContext | None, *, is_beyond_share: bool
    ) -> list[QueuedSequence]:
        item = super().enqueue(sequences, call, trace, is_beyond_share=is_beyond_share)
        self.policy.add(item)
        return item

    def planned_shapes(self) -> list[BatchShape]:
        return []


class WholeItems:
    """Batches of whole items, in the shapes of another policy; see BatchPolicy."""

    def __init__(self, shapes: BatchPolicy, queue: SequenceQueue) -> None:
        self.deadlines = shapes.deadlines
        self._shapes = shapes
        self._queue = queue
        # The item of each sequence, by the number of the sequence.
        self._items: dict[int, Sequence[QueuedSequence]] = {}

    def add(self, item: Sequence[QueuedSequence]) -> None:
        """Keeps the sequences of an item together until each has its result."""
        for sequence in item:
            self._items[sequence.rank.number] = item
            sequence.future.add_done_callback(partial(self._forget, sequence.rank.number))

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float = math.inf) -> Batch:
        """Takes the waiting sequences of the same item; see BatchPolicy."""
        others = [sequence for sequence in self._items[oldest.rank.number] if sequence.is_waiting]
        for sequence in others:
            self._queue.remove(sequence)
        return self.batch_of([oldest, *others])

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        return self._shapes.batch_of(members)

    def lone_tokens(self, padded_tokens: int) -> int:
        return self._shapes.lone_tokens(padded_tokens)

    def _forget(self, number: int, _: object) -> None:
        del self._items[number]
