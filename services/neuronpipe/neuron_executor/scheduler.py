"""Waiting sequences to batches on a model's cores.

Sequences wait in one bounded queue. A free core takes the oldest and, without waiting for more, others of nearly its length, as many
as make the batch efficient. What its caller gave up (cancelled), and what would not be done by its deadline, is dropped when the batch
is formed. A batch that fails is run again one sequence at a time, so that one bad sequence fails alone. A core that is lost gets no more,
and what it had goes back to the queue. Knows no transport and no task.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
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
from neuronpipe.neuron_executor.bucketing import best_batch
from neuronpipe.neuron_executor.cores import Cores
from neuronpipe.neuron_executor.queue import SequenceQueue, Waiting
from neuronpipe.neuron_executor.records import BatchRun, ModelRecords

# A batch is large enough once its overhead is this share of its time; beyond, more sequences only make each other wait.
_ENOUGH_OVERHEAD = 0.04
# Running lengths apart costs a batch's overhead more, running them together costs the padding, up to this share of the overhead: what is
# left behind may find nearer company. (Throughput with 32 callers hardly depends on it: between 1/20 and 1/3 it stayed within 1.5 %,
# while padding grew from 4.5 to 11 % of the tokens; twice as much cost 5 %.)
_WORTHWHILE_PADDING = 1 / 6
# The shortest wait that a refused caller is told; a place is seldom free sooner.
_MIN_RETRY_AFTER_S = 0.05
# How often at most the queue is searched for what nobody waits for any more, so that refusing stays cheap: 4096 sequences take 2.7 ms
# (measured 2026-11-21 on a CPU with two cores).
_SWEEP_INTERVAL_S = 0.05
# Where no batch runs or has run for so long, how long one takes is to be found out again: or a machine that was slow for a while would
# refuse every deadline for ever.
_ESTIMATE_LIFE_S = 1.0
# For so long after a sequence came too late to be computed, those that could not wait for a full batch are dropped as well. The oldest
# are the most urgent, and each would have a batch of nearly its own: at twice the load that can be borne, a device with an overhead of
# 20 ms did 125 sequences a second instead of 700 (simulated 2026-11-21).
_LATE_FOR_S = 1.0
# A sequence during which so many cores were lost fails: it may be what they were lost through. After the first it runs alone, so that it
# takes no others along.
_MAX_LOST_CORES = 2


class CoresLost(Exception):
    """No core is left. The process has to end: its callers send what waits elsewhere."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_tokens` counts padded tokens; one sequence alone may exceed it. Neither limits batches in buckets."""

    max_batch_size: int
    max_batch_tokens: int
    max_queue_sequences: int


@dataclass(slots=True)
class Computed:
    """One sequence's outputs and the batch that it ran in; times on time.monotonic_ns()."""

    outputs: Arrays
    started_ns: int
    finished_ns: int
    batch_size: int
    bucket_tokens: int


_Waiting: TypeAlias = Waiting[Computed]


class Scheduler:
    """Schedules one model. Made by `running_scheduler`, which owns its tasks."""

    def __init__(
        self, backend: Backend, spec: ModelSpec, limits: Limits, batch_time: BatchTime, lone_batch_time: BatchTime, records: ModelRecords
    ) -> None:
        """`lone_batch_time`: of batches that run while the other cores have nothing to do."""
        self._backend = backend
        self._spec = spec
        self._limits = limits
        self._batch_time = batch_time
        self._lone_batch_time = lone_batch_time
        self._records = records
        self._queue: SequenceQueue[Computed] = SequenceQueue()
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()
        self._cores = Cores(backend.cores)
        self._computed = 0
        self._unwanted = 0
        self._next_sweep_s = 0.0
        self._last_batch_s = time.monotonic()
        # Of interactive and of bulk sequences.
        self._late_until_s = [0.0, 0.0]
        self._is_closed = False

    @property
    def queued(self) -> tuple[int, int]:
        """Sequences that wait, and their padded tokens."""
        return len(self._queue), self._queue.tokens_before(is_bulk=True)

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
        if self._is_closed and self._cores.left:  # without a core, who comes before the process ends waits as well, to be sent elsewhere
            raise _stopping()
        if not sequences:
            raise InvalidInput("sequences", "holds none")
        if len(sequences) > limit:
            raise InvalidInput("input", f"{len(sequences)} sequences, the executor's queue takes {limit}")
        if len(self._queue) + len(sequences) > limit:
            self._sweep()
        queued = len(self._queue)
        if queued + len(sequences) > limit:
            raise Overloaded(f"{queued} sequences wait for {self._spec.name!r}, the limit is {limit}", self._wait_s(is_bulk=is_bulk))
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        waiting = []
        for arrays in sequences:
            tokens = self._spec.tokens_of(arrays)
            padded = self._backend.round_tokens(tokens)
            waiting.append(Waiting(now_s, deadline_s, next(self._numbers), is_bulk, arrays, tokens, padded, loop.create_future(), trace))
        longest_s = self._alone_s(max(one.padded_tokens for one in waiting))
        if not self._is_in_time(deadline_s - longest_s, is_bulk=is_bulk):
            raise DeadlineExceeded("the deadline would pass in the executor's queue")
        for one in waiting:
            self._queue.push(one)
        self._arrived.set()
        return waiting

    def _is_in_time(self, start_s: float, *, is_bulk: bool) -> bool:
        """Whether a sequence that comes now can begin by then."""
        if time.monotonic() + self._queue_time_s(is_bulk=is_bulk) < start_s:
            return True
        self._sweep()  # it must not be refused for the sake of those who left
        return time.monotonic() + self._queue_time_s(is_bulk=is_bulk) < start_s

    def _alone_s(self, padded_tokens: int) -> float:
        """How long a sequence takes in a batch of its own, as far as is known."""
        is_idle = not self._cores.running
        if is_idle and time.monotonic() >= self._last_batch_s + _ESTIMATE_LIFE_S:
            return 0.0
        batch_time = self._lone_batch_time if is_idle and not len(self._queue) else self._batch_time
        return batch_time.seconds(self._computed_tokens(1, padded_tokens))

    def _computed_tokens(self, rows: int, padded_tokens: int) -> int:
        """What the device computes for so many rows."""
        bucket = self._backend.buckets.find(rows, padded_tokens) if self._backend.buckets else None
        return bucket.padded_tokens if bucket else rows * padded_tokens

    def _sweep(self) -> None:
        """Makes room of what nobody waits for any more."""
        if time.monotonic() >= self._next_sweep_s:
            self._queue.drop_unwanted()
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    def _queue_time_s(self, *, is_bulk: bool) -> float:
        """How long what waits already keeps the cores busy, which a new sequence waits at least."""
        return self._queue.tokens_before(is_bulk=is_bulk) * self._batch_time.token_s / max(1, self._cores.left)

    def _wait_s(self, *, is_bulk: bool) -> float:
        return max(_MIN_RETRY_AFTER_S, self._queue_time_s(is_bulk=is_bulk))

    async def work(self, core: int) -> None:
        """Runs batches on one core until it is lost; so many times at once as the back end has batches in flight. Raises CoresLost."""
        while batch := await self._next_batch(core):
            self._cores.begin(core)
            try:
                await self._run_batch(core, batch)
            except CoresLost:
                raise
            except BaseException:  # the worker was cancelled
                _fail(batch, _stopping())
                raise
            finally:
                self._cores.end(core)

    async def _next_batch(self, core: int) -> list[_Waiting]:
        """None where the core is lost."""
        while not self._cores.is_lost(core):
            if self._cores.may_take(core) and (batch := self._take_batch()):
                if self._backend.in_flight > 1:
                    self._arrived.set()  # for those that left the rest to this core
                return batch
            self._arrived.clear()
            await self._arrived.wait()
        return []

    def _take_batch(self) -> list[_Waiting]:
        """The oldest sequence that is still wanted, and others like it."""
        while oldest := self._queue.oldest():
            self._queue.pop(oldest)
            if self._can_wait(oldest):
                batch = [oldest]
                if oldest.lost_cores:
                    return batch
                if self._backend.buckets:
                    self._fill_bucket(batch, self._backend.buckets.batches(oldest.padded_tokens))
                    return batch
                for length in self._queue.near(oldest.padded_tokens, is_bulk=oldest.is_bulk):
                    if not self._fill(batch, length):
                        break
                return batch
        return []

    def _can_wait(self, one: _Waiting) -> bool:
        """Whether someone waits for a sequence, and still will when it has been computed."""
        if one.future.done():
            return False
        if not one.is_wanted(self._alone_s(one.padded_tokens)):
            self._late_until_s[one.is_bulk] = time.monotonic() + _LATE_FOR_S
            return False
        if time.monotonic() >= self._late_until_s[one.is_bulk]:
            return True
        waiting_tokens = one.padded_tokens + self._queue.tokens_before(is_bulk=one.is_bulk)
        most_rows = self._backend.buckets.batches(one.padded_tokens)[-1] if self._backend.buckets else self._limits.max_batch_size
        full_tokens = min(waiting_tokens, self._enough_tokens, one.padded_tokens * most_rows)
        return one.is_wanted(self._batch_time.seconds(int(full_tokens)))

    @property
    def _enough_tokens(self) -> float:
        """A batch of so many padded tokens need not grow any more."""
        return min(self._batch_time.overhead_tokens / _ENOUGH_OVERHEAD, self._limits.max_batch_tokens)

    def _fill_bucket(self, batch: list[_Waiting], sizes: Sequence[int]) -> None:
        """Adds sequences of the same length to make the best use of a bucket, and shorter ones where rows would stay empty.

        Longer ones have buckets of their own: one of them would make the whole batch longer.
        """
        tokens, is_bulk, earliest_s = batch[0].padded_tokens, batch[0].is_bulk, batch[0].deadline_s
        idle_cores = max(1, self._cores.idle)
        share = -(-(1 + self._queue.count(tokens, is_bulk=is_bulk)) // idle_cores)
        now_s = time.monotonic()
        rows = best_batch(sizes, share, lambda size: self._batch_time.seconds(size * tokens), earliest_s - now_s)
        finish_s = now_s + self._batch_time.seconds(rows * tokens)
        # An idle core computes short ones sooner.
        shorter = [length for length in self._queue.near(tokens, is_bulk=is_bulk) if length < tokens] if idle_cores == 1 else []
        for length, room in (tokens, min(rows, share)), *((length, rows) for length in shorter):
            while len(batch) < room and (one := self._queue.first(length, is_bulk=is_bulk)):
                if not self._can_wait(one):
                    self._queue.pop(one)
                elif one.lost_cores or finish_s >= one.deadline_s:
                    break
                else:
                    self._queue.pop(one)
                    batch.append(one)

    def _fill(self, batch: list[_Waiting], length: int) -> bool:
        """Adds waiting sequences of a padded length while that pays. Returns whether the batch can still grow."""
        overhead_tokens = self._batch_time.overhead_tokens
        # A share for every idle core, or one would work and the others watch.
        own_tokens = sum(one.padded_tokens for one in batch)
        share = (self._queue.tokens_before(is_bulk=True) + own_tokens) / max(1, self._cores.idle)
        padded = max(one.padded_tokens for one in batch)
        earliest_s = min(one.deadline_s for one in batch)
        padding = 0
        while one := self._queue.first(length, is_bulk=batch[0].is_bulk):
            if not self._can_wait(one):  # or it would keep those behind it out of the batch
                self._queue.pop(one)
                continue
            if one.lost_cores:
                return True
            new_padded = max(padded, length)
            tokens = new_padded * (len(batch) + 1)
            if len(batch) == self._limits.max_batch_size or own_tokens >= share or padded * len(batch) >= self._enough_tokens:
                return False
            padding += tokens - padded * len(batch) - length
            finish_s = time.monotonic() + self._batch_time.seconds(tokens)
            if (
                tokens > self._limits.max_batch_tokens
                or padding > overhead_tokens * _WORTHWHILE_PADDING
                or finish_s >= min(earliest_s, one.deadline_s)
            ):
                return True
            self._queue.pop(one)
            batch.append(one)
            own_tokens += length
            padded, earliest_s = new_padded, min(earliest_s, one.deadline_s)
        return True

    async def _run_batch(self, core: int, batch: list[_Waiting]) -> None:
        lengths = [one.tokens for one in batch]
        bucket_tokens = max(one.padded_tokens for one in batch)
        computed_tokens = self._computed_tokens(len(batch), bucket_tokens)
        inputs = pad([one.arrays for one in batch], bucket_tokens, self._spec)
        is_alone = self._cores.idle == self._cores.left - 1 and self._cores.running == 1 and not len(self._queue)
        started_ns = time.monotonic_ns()
        finished_ns = 0
        try:
            outputs = await self._backend.run(core, inputs, is_alone=is_alone)
            finished_ns = time.monotonic_ns()
            self._last_batch_s = time.monotonic()
            rows = [cut(outputs, row, tokens, self._spec) for row, tokens in enumerate(lengths)]
        except Exception as fault:  # whatever a back end raises must not end the core
            ended_ns = finished_ns or time.monotonic_ns()
            self._records.batch(BatchRun(core, is_alone, bucket_tokens, computed_tokens, started_ns, ended_ns), batch, fault)
            if isinstance(fault, CoreLost):
                self._lose(core, batch, fault)
            else:
                await self._run_alone(core, batch, fault)
            return
        batch_time = self._lone_batch_time if is_alone else self._batch_time
        batch_time.observe(computed_tokens, (finished_ns - started_ns) / 1e9)
        self._records.batch(BatchRun(core, is_alone, bucket_tokens, computed_tokens, started_ns, finished_ns), batch)
        self._computed += len(batch)
        self._unwanted += sum(one.future.done() for one in batch)
        for one, arrays in zip(batch, rows, strict=True):
            if error := fault_of(arrays):
                ids = one.trace.ids if one.trace else {}
                log_warning("a sequence's outputs are not finite", model=self._spec.name, core=core, tokens=one.tokens, **ids)
                _fail([one], error)
            elif not one.future.done():
                one.future.set_result(Computed(arrays, started_ns, finished_ns, len(batch), bucket_tokens))

    async def _run_alone(self, core: int, batch: list[_Waiting], fault: Exception) -> None:
        """After a batch failed: runs each sequence by itself; a batch of one has found the guilty sequence."""
        if len(batch) > 1:
            for one in batch:
                if self._cores.is_lost(core):
                    self._queue.push(one)
                elif one.is_wanted(0):
                    await self._run_batch(core, [one])
            return
        (one,) = batch
        ids = one.trace.ids if one.trace else {}
        log_fault("a sequence could not be computed", fault, model=self._spec.name, core=core, tokens=one.tokens, **ids)
        _fail(batch, InternalError("the model could not compute this input"))

    def _lose(self, core: int, batch: list[_Waiting], fault: CoreLost) -> None:
        """Gives back what a lost core had. Raises CoresLost where it was the last one."""
        if self._cores.lose(core):
            log_fault("core lost", fault, model=self._spec.name, core=core, cores_left=self._cores.left)
        for one in batch:
            one.lost_cores += 1
            if one.lost_cores >= _MAX_LOST_CORES:
                _fail([one], InternalError("the model could not compute this input"))
            else:
                self._queue.push(one)
        self._arrived.set()
        if not self._cores.left:
            # What waits gets no answer here: it is sent elsewhere as soon as the process is gone.
            raise CoresLost(f"no core is left for the model {self._spec.name!r}")

    def close(self) -> None:
        """Takes no more; whoever still waits learns that the executor stops. Logs how many sequences were computed, and in vain."""
        if not self._is_closed:
            log("computed", model=self._spec.name, version=self._spec.version, sequences=self._computed, unwanted=self._unwanted)
        self._is_closed = True
        if self._cores.left:
            _fail(self._queue, _stopping())
        self._queue.clear()


def _fail(batch: Iterable[_Waiting], error: NeuronpipeError) -> None:
    for one in batch:
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
) -> AsyncIterator[Scheduler]:
    """A scheduler with a worker for each core, which end with the block; a worker that crashes ends the block with its error."""
    records = records or ModelRecords(Telemetry(), spec, "", backend.cores)
    scheduler = Scheduler(backend, spec, limits, batch_time, lone_batch_time or batch_time, records)
    records.watch(lambda: scheduler.queued)
    try:
        async with beside(*(scheduler.work(core) for _ in range(backend.in_flight) for core in range(backend.cores))):
            yield scheduler
    finally:
        scheduler.close()
