"""The contract of a batch policy: which of a model's waiting sequences run together, in which shape."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neuronpipe.stages.neuron_executor.batching.forecast import Forecast
from neuronpipe.stages.neuron_executor.batching.queue import QueuedSequence

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
