"""Waiting sequences to batches on a model's cores.

Sequences wait in one bounded queue. A free core takes the oldest and, without waiting for more, those behind it that fit into the
batch. What its caller gave up (cancelled, or past its deadline) is dropped when the batch is formed. A batch that fails is run again
one sequence at a time, so that one bad sequence fails alone. Knows no transport and no task.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neuronpipe.core.background import beside
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.logs import log_fault, log_warning
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Arrays
from neuronpipe.neuron_executor.backends.base import Backend
from neuronpipe.neuron_executor.batching import check_sequence, cut, fault_of, pad

# How fast the estimate of a sequence's time follows the load: the weight of the newest batch.
_ESTIMATE_WEIGHT = 0.2
# The shortest wait that a refused caller is told; a place is seldom free sooner.
_MIN_RETRY_AFTER_S = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` counts padded tokens; one sequence alone may exceed it."""

    max_batch_size: int
    max_batch_tokens: int
    max_queue_sequences: int


@dataclass(frozen=True, slots=True)
class Computed:
    """One sequence's outputs and the batch that it ran in; times on time.monotonic_ns()."""

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    arrays: Arrays
    tokens: int
    deadline_s: float | None
    future: asyncio.Future[Computed]

    def is_wanted(self) -> bool:
        """Whether someone still waits for it; tells a caller past its deadline so."""
        if self.future.done():
            return False
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.future.set_exception(DeadlineExceeded("the deadline passed in the executor's queue"))
            return False
        return True


class Scheduler:
    """Schedules one model. Made by `running_scheduler`, which owns its tasks."""

    def __init__(self, backend: Backend, spec: ModelSpec, limits: Limits) -> None:
        self._backend = backend
        self._spec = spec
        self._limits = limits
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._sequence_time_s = 0.0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(max_workers=backend.cores, thread_name_prefix=f"core-{spec.name}")

    async def run(self, sequences: Sequence[Arrays], deadline_s: float | None) -> list[Computed]:
        """Runs the sequences of one input and returns their outputs in order.

        All are queued or none. Raises InvalidInput, Overloaded, DeadlineExceeded, Unavailable, and InternalError where a sequence could
        not be computed. The caller may leave at any time (cancel): its sequences are then never computed, unless they are already.
        """
        for arrays in sequences:
            check_sequence(arrays, self._spec)
        futures = [one.future for one in self._enqueue(sequences, deadline_s)]
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    def _enqueue(self, sequences: Sequence[Arrays], deadline_s: float | None) -> list[_Waiting]:
        limit = self._limits.max_queue_sequences
        if self._is_closed:
            raise _stopping()
        if not sequences:
            raise InvalidInput("sequences", "holds none")
        if len(sequences) > limit:
            raise InvalidInput("input", f"{len(sequences)} sequences, the executor's queue takes {limit}")
        if len(self._queue) + len(sequences) > limit:
            self._queue = deque(one for one in self._queue if one.is_wanted())
        queued = len(self._queue)
        if queued + len(sequences) > limit:
            raise Overloaded(f"{queued} sequences wait for {self._spec.name!r}, the limit is {limit}", self._drain_time_s())
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(arrays, len(arrays["input_ids"]), deadline_s, loop.create_future()) for arrays in sequences]
        self._queue.extend(waiting)
        self._arrived.set()
        return waiting

    def _drain_time_s(self) -> float:
        return max(_MIN_RETRY_AFTER_S, len(self._queue) * self._sequence_time_s / self._backend.cores)

    async def work(self, core: int) -> None:
        """Runs batches on one core for ever."""
        while True:
            batch = await self._next_batch()
            try:
                await self._run_batch(core, batch)
            finally:  # whoever has no answer yet gets none: the worker was cancelled
                _fail(batch, _stopping())

    async def _next_batch(self) -> list[_Waiting]:
        while True:
            batch = self._take_batch()
            if batch:
                return batch
            self._arrived.clear()
            await self._arrived.wait()

    def _take_batch(self) -> list[_Waiting]:
        """The oldest wanted sequence and those behind it, in order, until one does not fit."""
        batch: list[_Waiting] = []
        longest = 0
        while self._queue and len(batch) < self._limits.max_batch_size:
            if not self._queue[0].is_wanted():
                self._queue.popleft()
                continue
            padded = self._backend.round_tokens(max(longest, self._queue[0].tokens))
            if batch and padded * (len(batch) + 1) > self._limits.max_batch_tokens:
                break
            longest = max(longest, self._queue[0].tokens)
            batch.append(self._queue.popleft())
        return batch

    async def _run_batch(self, core: int, batch: list[_Waiting]) -> None:
        began_s = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            outcomes = await loop.run_in_executor(self._threads, self._compute, core, [one.arrays for one in batch])
        except Exception as fault:  # whatever a back end raises must not end the core
            await self._run_alone(core, batch, fault)
            return
        newest_s = (time.monotonic() - began_s) / len(batch)
        weight = _ESTIMATE_WEIGHT if self._sequence_time_s else 1.0
        self._sequence_time_s += weight * (newest_s - self._sequence_time_s)
        for one, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, NeuronpipeError):
                log_warning("a sequence's outputs are not finite", model=self._spec.name, core=core, tokens=one.tokens)
                _fail([one], outcome)
            elif not one.future.done():
                one.future.set_result(outcome)

    async def _run_alone(self, core: int, batch: list[_Waiting], fault: Exception) -> None:
        """After a batch failed: runs each sequence by itself; a batch of one has found the guilty sequence."""
        if len(batch) > 1:
            for one in batch:
                if one.is_wanted():
                    await self._run_batch(core, [one])
            return
        log_fault("a sequence could not be computed", fault, model=self._spec.name, core=core, tokens=batch[0].tokens)
        _fail(batch, InternalError("the model could not compute this input"))

    def _compute(self, core: int, sequences: list[Arrays]) -> list[Computed | NeuronpipeError]:
        """Pads, runs and cuts one batch; in the core's thread."""
        lengths = [len(arrays["input_ids"]) for arrays in sequences]
        bucket_tokens = self._backend.round_tokens(max(lengths))
        started_ns = time.monotonic_ns()
        outputs = self._backend.run(core, pad(sequences, bucket_tokens, self._spec))
        finished_ns = time.monotonic_ns()
        outcomes: list[Computed | NeuronpipeError] = []
        for row, tokens in enumerate(lengths):
            arrays = cut(outputs, row, tokens, self._spec)
            outcomes.append(fault_of(arrays) or Computed(arrays, started_ns, finished_ns, len(sequences), bucket_tokens))
        return outcomes

    async def close(self) -> None:
        """Waits for the batches that run; whoever still waits learns that the executor stops."""
        self._is_closed = True
        _fail(self._queue, _stopping())
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)


def _fail(batch: Iterable[_Waiting], error: NeuronpipeError) -> None:
    for one in batch:
        if not one.future.done():
            one.future.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("the neuron-executor is stopping")


@asynccontextmanager
async def running_scheduler(backend: Backend, spec: ModelSpec, limits: Limits) -> AsyncIterator[Scheduler]:
    """A scheduler with a worker for each core, which end with the block; a worker that crashes ends the block with its error."""
    scheduler = Scheduler(backend, spec, limits)
    try:
        async with beside(*(scheduler.work(core) for core in range(backend.cores))):
            yield scheduler
    finally:
        await scheduler.close()
