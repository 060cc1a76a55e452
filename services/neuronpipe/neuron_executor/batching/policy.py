"""The contract of a batch policy: which of a model's waiting sequences run together, in which shape."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neuronpipe.neuron_executor.batching.forecast import Forecast
from neuronpipe.neuron_executor.batching.queue import QueuedSequence

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
class Batch:
    """Sequences that run together, each padded to `padded_tokens`. `computed_tokens`: of all rows, those that stay empty included."""

    members: list[QueuedSequence]
    padded_tokens: int
    computed_tokens: int


class BatchPolicy(Protocol):
    """Forms the batches of one model out of its queue."""

    def fill(self, oldest: QueuedSequence, wait_s: float, idle_cores: int) -> Batch:
        """A batch of a sequence that was taken out of the queue already and of others, which this takes out.

        It begins in `wait_s`. `idle_cores` (from 1 on) can share what waits, the one that the batch is for included. What would be too
        late is dropped on the way.
        """

    def batch_of(self, members: list[QueuedSequence]) -> Batch:
        """Just these sequences as a batch."""

    def lone_tokens(self, padded_tokens: int) -> int:
        """What the device computes for a sequence of that padded length in a batch of its own."""

    def can_wait(self, one: QueuedSequence, wait_s: float) -> bool:
        """Whether someone waits for a sequence, and still will when it has been computed by a core that is free in `wait_s`.

        Tells its caller where not.
        """


class DeadlineCheck:
    """Gives up sequences of one model that would be too late.

    `lone_tokens`: see BatchPolicy. `full_tokens`: what the device computes for a batch with this sequence that is as large as is worth
    it, as far as what waits fills it.
    """

    def __init__(self, forecast: Forecast, lone_tokens: Callable[[int], int], full_tokens: Callable[[QueuedSequence], int]) -> None:
        self._forecast = forecast
        self._lone_tokens = lone_tokens
        self._full_tokens = full_tokens
        # Of interactive and of bulk sequences.
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
