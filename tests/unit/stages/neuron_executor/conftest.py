"""The clock of the scheduler, and a queue of sequences."""

import asyncio
import math
from collections.abc import Callable

import numpy as np
import pytest

from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, QueuedSequence, QueueRank, SequenceQueue
from tests.suite.fixed_clock import FixedClock
from tests.unit.stages.neuron_executor.scheduling import tell_time

Push = Callable[..., QueuedSequence]


@pytest.fixture
def clock(clock: FixedClock, monkeypatch: pytest.MonkeyPatch) -> FixedClock:
    """The clock of the scheduler and of its parts."""
    tell_time(monkeypatch, clock)
    return clock


@pytest.fixture
def queue() -> SequenceQueue:
    return SequenceQueue()


@pytest.fixture
async def push(queue: SequenceQueue) -> Push:
    """Adds a sequence, of three tokens padded to four; numbers count up as they do in the scheduler."""

    def push(
        arrived_s: float = 0,
        *,
        padded_tokens: int = 4,
        deadline_s: float = math.inf,
        is_bulk: bool = False,
        is_beyond_share: bool = False,
    ) -> QueuedSequence:
        future: asyncio.Future[list[ComputedSequence]] = asyncio.get_running_loop().create_future()
        arrays = {"input_ids": np.ones(3, np.int32)}
        rank = QueueRank(is_beyond_share, arrived_s, deadline_s, len(queue))
        one = QueuedSequence(
            rank=rank, is_bulk=is_bulk, inputs=[arrays], tokens=3, padded_tokens=padded_tokens, future=future
        )
        queue.push(one)
        return one

    return push
