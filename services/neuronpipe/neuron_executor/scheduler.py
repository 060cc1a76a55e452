"""Waiting sequences to batches on a model's cores.

Sequences wait in one bounded queue, out of which a free core takes a batch (choosing.py) without waiting for more. A batch that fails is
run again one sequence at a time, so that one bad sequence fails alone. A core that is lost gets no more, and what it had goes back to the
queue. Knows no transport and no task.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from neuronpipe.core.background import beside
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Arrays
from neuronpipe.core.tracing import SpanContext
from neuronpipe.neuron_executor.backends.base import Backend, CoreLost
from neuronpipe.neuron_executor.batch_time import BatchTime
from neuronpipe.neuron_executor.batching import check_sequence, cut, fault_of, pad
from neuronpipe.neuron_executor.choosing import Batch, BatchChooser, Limits
from neuronpipe.neuron_executor.cores import Cores
from neuronpipe.neuron_executor.forecast import Forecast
from neuronpipe.neuron_executor.queue import SequenceQueue, Waiting
from neuronpipe.neuron_executor.records import BatchRun, ModelRecords

# The shortest wait that a refused caller is told; a place is seldom free sooner.
_MIN_RETRY_AFTER_S = 0.05
# How often at most the queue is searched for what nobody waits for any more, so that refusing stays cheap: 4096 sequences take 2.7 ms
# (measured 2026-11-21 on a CPU with two cores).
_SWEEP_INTERVAL_S = 0.05
# A sequence during which so many cores were lost fails: it may be what they were lost through. After the first it runs alone, so that it
# takes no others along.
_MAX_LOST_CORES = 2


class CoresLost(Exception):
    """No core is left. The process has to end."""


@dataclass(slots=True)
class Computed:
    """One sequence's outputs and the batch that it ran in; times on time.monotonic_ns()."""

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int


_Waiting: TypeAlias = Waiting[Computed]
_Batch: TypeAlias = Batch[Computed]


class Scheduler:
    """Schedules one model. Made by `running_scheduler`, which owns its tasks."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        limits: Limits,
        batch_time: BatchTime,
        lone_batch_time: BatchTime,
        records: ModelRecords,
        lost: Collection[int],
    ) -> None:
        """`lone_batch_time`: of batches that run while the other cores have nothing to do. `lost`: cores that are lost already."""
        self._backend = backend
        self._spec = spec
        self._limits = limits
        self._records = records
        self._queue: SequenceQueue[Computed] = SequenceQueue()
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()
        self._cores = Cores(backend.cores, lost)
        self._forecast = Forecast(self._queue, self._cores, backend.buckets, batch_time, lone_batch_time)
        self._chooser = BatchChooser(self._queue, self._cores, self._forecast, limits, backend.buckets)
        self._computed = 0
        self._unwanted = 0
        self._next_sweep_s = 0.0
        self._is_closed = False

    @property
    def queued(self) -> tuple[int, int]:
        """Sequences that wait, and their padded tokens."""
        return len(self._queue), self._queue.tokens_before(is_bulk=True)

    @property
    def cores_left(self) -> int:
        """Cores that are not lost."""
        return self._cores.left

    async def run(
        self, sequences: Sequence[Arrays], deadline_s: float | None, *, is_bulk: bool = False, trace: SpanContext | None = None
    ) -> list[Computed]:
        """Runs the sequences of one input and returns their outputs in order.

        All are queued or none. Raises InvalidInput, Overloaded, DeadlineExceeded (as soon as it is clear that the deadline cannot be
        met), Unavailable, and InternalError where a sequence could not be computed. The caller may leave at any time (cancel): its
        sequences are then never computed, unless they are already.
        """
        for arrays in sequences:
            check_sequence(arrays, self._spec)
        futures = [one.future for one in self._enqueue(sequences, math.inf if deadline_s is None else deadline_s, is_bulk, trace)]
        try:
            return [await futures[0]] if len(futures) == 1 else list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    def _enqueue(self, sequences: Sequence[Arrays], deadline_s: float, is_bulk: bool, trace: SpanContext | None) -> list[_Waiting]:
        limit = self._limits.max_queue_sequences
        if self._is_closed:
            raise _stopping()
        if not sequences:
            raise InvalidInput("sequences", "holds none")
        if len(sequences) > limit:
            raise InvalidInput("input", f"{len(sequences)} sequences, the executor's queue takes {limit}")
        if len(self._queue) + len(sequences) > limit:
            self._sweep()
        queued = len(self._queue)
        if queued + len(sequences) > limit:
            retry_after_s = max(_MIN_RETRY_AFTER_S, self._forecast.queue_s(is_bulk=is_bulk))
            raise Overloaded(f"{queued} sequences wait for {self._spec.name!r}, the limit is {limit}", retry_after_s)
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        waiting = []
        for arrays in sequences:
            tokens = self._spec.tokens_of(arrays)
            padded = self._backend.round_tokens(tokens)
            waiting.append(Waiting(now_s, deadline_s, next(self._numbers), is_bulk, arrays, tokens, padded, loop.create_future(), trace))
        longest_s = self._forecast.alone_s(max(one.padded_tokens for one in waiting))
        if not self._is_in_time(deadline_s - longest_s, is_bulk=is_bulk):
            raise DeadlineExceeded("the deadline would pass in the executor's queue")
        for one in waiting:
            self._queue.push(one)
        self._arrived.set()
        return waiting

    def _is_in_time(self, start_s: float, *, is_bulk: bool) -> bool:
        """Whether a sequence that comes now can begin by then."""
        if time.monotonic() + self._forecast.queue_s(is_bulk=is_bulk) < start_s:
            return True
        self._sweep()  # it must not be refused for the sake of those who left
        return time.monotonic() + self._forecast.queue_s(is_bulk=is_bulk) < start_s

    def _sweep(self) -> None:
        """Makes room of what nobody waits for any more."""
        if time.monotonic() >= self._next_sweep_s:
            self._queue.drop_unwanted()
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    async def work(self, core: int) -> None:
        """Runs batches on one core until it is lost; so many times at once as the back end has batches in flight. Raises CoresLost."""
        while batch := await self._next_batch(core):
            try:
                await self._run_batch(core, batch)
            except BaseException:  # the worker was cancelled, or the last core is lost
                _fail(batch.members, _stopping())
                raise

    async def _next_batch(self, core: int) -> _Batch | None:
        """None where the core is lost."""
        while not self._cores.is_lost(core):
            if self._cores.may_take(core) and (batch := self._chooser.take(core)):
                if self._backend.in_flight > 1:
                    self._arrived.set()  # for those that left the rest to this core
                return batch
            self._arrived.clear()
            await self._arrived.wait()
        return None

    async def _run_batch(self, core: int, batch: _Batch) -> None:
        members = batch.members
        inputs = pad([one.arrays for one in members], batch.padded_tokens, self._spec)
        self._cores.begin(core, self._forecast.batch_s(batch.computed_tokens), is_kept_apart=bool(members[0].lost_cores))
        is_alone = self._cores.idle == self._cores.left - 1 and self._cores.running == 1 and not len(self._queue)
        try:
            try:
                outputs = await self._backend.run(core, inputs, is_alone=is_alone)
            finally:
                started_ns, ended_ns = self._cores.end(core)
            rows = [cut(outputs, row, one.tokens, self._spec) for row, one in enumerate(members)]
        except Exception as fault:  # whatever a back end raises must not end the core
            self._records.batch(BatchRun(core, is_alone, batch.padded_tokens, batch.computed_tokens, started_ns, ended_ns), members, fault)
            if isinstance(fault, CoreLost):
                self._lose(core, members, fault)
            else:
                await self._run_alone(core, members, fault)
            return
        self._forecast.observe(batch.computed_tokens, (ended_ns - started_ns) / 1e9, is_alone=is_alone)
        self._records.batch(BatchRun(core, is_alone, batch.padded_tokens, batch.computed_tokens, started_ns, ended_ns), members)
        self._computed += len(members)
        self._unwanted += sum(one.future.done() for one in members)
        for one, arrays in zip(members, rows, strict=True):
            if error := fault_of(arrays):
                ids = one.trace.ids if one.trace else {}
                log_warning("a sequence's outputs are not finite", model=self._spec.name, core=core, tokens=one.tokens, **ids)
                _fail([one], error)
            elif not one.future.done():
                one.future.set_result(Computed(arrays, started_ns, ended_ns, len(members), batch.padded_tokens))

    async def _run_alone(self, core: int, members: list[_Waiting], fault: Exception) -> None:
        """After a batch failed: runs each sequence by itself; a batch of one has found the guilty sequence."""
        if len(members) > 1:
            for one in members:
                if self._cores.is_lost(core):
                    self._give_back(one)
                elif one.is_wanted(0):
                    await self._run_batch(core, self._chooser.of([one]))
            return
        (one,) = members
        ids = one.trace.ids if one.trace else {}
        log_fault("a sequence could not be computed", fault, model=self._spec.name, core=core, tokens=one.tokens, **ids)
        _fail(members, InternalError("the model could not compute this input"))

    def _lose(self, core: int, members: list[_Waiting], fault: CoreLost) -> None:
        """Gives back what a lost core had. Raises CoresLost where it was the last one."""
        if self._cores.lose(core):
            log_fault("core lost", fault, model=self._spec.name, core=core, cores_left=self._cores.left)
        for one in members:
            one.lost_cores += fault.has_begun
            if one.lost_cores >= _MAX_LOST_CORES:
                _fail([one], InternalError("the model could not compute this input"))
            else:
                self._give_back(one)
        self._arrived.set()  # the core's other worker ends, and others may work ahead now
        if not self._cores.left:
            self.close()
            raise CoresLost(f"no core is left for the model {self._spec.name!r}")

    def _give_back(self, one: _Waiting) -> None:
        """Puts a sequence of a lost core back into the queue, for the cores that are left."""
        if self._is_closed:
            _fail([one], _stopping())
        elif not one.future.done():
            self._queue.push(one)
            self._arrived.set()

    def close(self) -> None:
        """Takes no more; whoever still waits learns that the executor stops. Logs how many sequences were computed, and in vain."""
        if not self._is_closed:
            log("computed", model=self._spec.name, version=self._spec.version, sequences=self._computed, unwanted=self._unwanted)
        self._is_closed = True
        _fail(self._queue, _stopping())
        self._queue.clear()


def _fail(members: Iterable[_Waiting], error: NeuronpipeError) -> None:
    for one in members:
        if not one.future.done():
            one.future.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("the neuron-executor is stopping")


@asynccontextmanager
async def running_scheduler(
    backend: Backend,
    spec: ModelSpec,
    limits: Limits,
    batch_time: BatchTime,
    lone_batch_time: BatchTime | None = None,
    records: ModelRecords | None = None,
    lost: Collection[int] = (),
) -> AsyncIterator[Scheduler]:
    """A scheduler with a worker for each core, which end with the block; a worker that crashes ends the block with its error.

    `lost`: cores that are lost already.
    """
    records = records or ModelRecords(Telemetry(), spec, "", backend.cores)
    scheduler = Scheduler(backend, spec, limits, batch_time, lone_batch_time or batch_time, records, lost)
    records.watch(lambda: scheduler.queued, lambda: scheduler.cores_left)
    try:
        async with beside(*(scheduler.work(core) for _ in range(backend.in_flight) for core in range(backend.cores))):
            yield scheduler
    finally:
        scheduler.close()
