"""Runs waiting sequences in batches on the cores of one device, which its models share.

A free core decides which model is next: the one with the oldest interactive sequence, or the oldest bulk sequence if
there is none. That model's policy then takes a batch out of its queue (batching.py), without waiting for more. While
interactive sequences come, bulk leaves one core idle, and its batches are short. A batch that fails is run again one
sequence at a time, so that one bad sequence fails alone. A core that is lost, or hangs, gets no more work, and its
sequences return to the queues. Knows no transport and no task.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from neuronpipe.core.logs import log_fault
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.backends.base import Backend, CoreLost
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver, BatchRun
from neuronpipe.stages.neuron_executor.batching import Batch, Limits
from neuronpipe.stages.neuron_executor.cores import Cores, CoresLost, CoreWatchdog
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel, fail, stopping, uncomputable
from neuronpipe.stages.neuron_executor.forecast import BatchTimes, Forecast, QueuedSequence

# A sequence fails when this many cores were lost while they computed it: it may be the reason. After the first loss it
# runs alone, so that no other sequence fails with it.
_MAX_LOST_CORES = 2
# A batch hangs when it has taken this many times its forecast, and longer than the configured limit.
_HANGS_AFTER = 10
# Interactive sequences are expected for this time after one. Until then, bulk batches grow only up to the limit. With
# four callers and a flood of jobs on two CPUs, the callers' p99 was 1.12 of that without jobs; without this rule, 2.09
# (tests/bench/jobs_beside.py).
_INTERACTIVE_FOR_S = 0.25
_BULK_BATCH_LIMIT_S = 0.006


class DeviceScheduler:
    """Owns the cores of a device. Its owner runs `workers`, and closes it when they have ended."""

    def __init__(self, cores: int, in_flight: int, batch_limit_s: float) -> None:
        """`in_flight`: batches given to a core at once. `batch_limit_s`: a core whose batch takes longer is lost."""
        self.cores = Cores(cores)
        self.forecasts: list[Forecast] = []
        self.numbers: Iterator[int] = itertools.count()
        self._in_flight = in_flight
        self._batch_limit_s = batch_limit_s
        self._models: list[ExecutorModel] = []
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._reserved: frozenset[int] = frozenset()
        self._reserving = asyncio.Lock()
        # A core that hangs is lost. Its workers return its sequences to the queues; a hanging thread is left alone.
        self._watchdogs = [CoreWatchdog(partial(self.lose, core)) for core in range(cores)]
        self._interactive_until_s = -math.inf
        self._is_closed = False

    def workers(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines to run as long as the device is used. They raise CoresLost."""
        return [self._work(core) for _ in range(self._in_flight) for core in range(self.cores.count)]

    def join(
        self, backend: Backend, spec: ModelSpec, limits: Limits, times: BatchTimes, observer: BatchObserver
    ) -> ExecutorModel:
        """Adds a model."""
        model = ExecutorModel(backend, spec, limits, self, times, observer)
        self._models.append(model)
        self.forecasts.append(model.forecast)
        return model

    async def leave(self, model: ExecutorModel) -> None:
        """Removes a model: ends its waiting requests, and waits for its running batches."""
        model.close()
        while model.batches_running:
            self._ended.clear()
            await self._ended.wait()
        self._models.remove(model)
        self.forecasts.remove(model.forecast)
        model.observer.unwatch()

    def close(self) -> None:
        """Takes no more sequences, for any model."""
        self._is_closed = True
        for model in self._models:
            model.close()

    def wake(self) -> None:
        """Lets cores look for work."""
        self._arrived.set()

    @asynccontextmanager
    async def reserved(self, cores: Collection[int]) -> AsyncIterator[None]:
        """Reserves a core for the block, so that a model can warm up while others are served.

        Raises CoreLost if the block takes longer than a batch may.
        """
        async with self._reserving:
            self._reserved = frozenset(cores)
            try:
                while not all(map(self.cores.is_idle, cores)):
                    self._ended.clear()
                    await self._ended.wait()
                for core in cores:
                    self.cores.begin(core, 0)
                try:
                    async with asyncio.timeout(self._batch_limit_s) as limit:
                        yield
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise CoreLost(f"a batch did not end within {self._batch_limit_s:g} s") from error
                finally:
                    for core in cores:
                        self.cores.end(core)
            finally:
                self._reserved = frozenset()
                self.wake()

    def lose(self, core: int, model_name: str, fault: CoreLost) -> None:
        """Marks a core as lost, for all models."""
        if self.cores.lose(core):
            log_fault("core lost", fault, model=model_name, core=core, cores_left=self.cores.left)
        self.wake()  # its workers end, and others may take batches ahead now

    async def _work(self, core: int) -> None:
        """Runs batches on one core until it is lost; one worker for each batch in flight. Raises CoresLost."""
        while found := await self._next_batch(core):
            model, batch = found
            try:
                await self._run_batch(core, model, batch)
            except BaseException:  # the worker was cancelled
                fail(batch.members, stopping())
                raise
        if self._models and not self.cores.left and not self._is_closed:
            self.close()
            names = ", ".join(repr(model.spec.name) for model in self._models)
            raise CoresLost(f"no core is left for the model {names}")

    async def _next_batch(self, core: int) -> tuple[ExecutorModel, Batch] | None:
        """Waits for a batch; None if the core is lost."""
        while not self.cores.is_lost(core):
            if core not in self._reserved and self.cores.may_take(core) and (found := self._take(core)):
                if self._in_flight > 1 or found[1].members[0].is_bulk:
                    self._arrived.set()  # for those that left the rest to this core
                return found
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _take(self, core: int) -> tuple[ExecutorModel, Batch] | None:
        """The next batch for a core; None if there is none for it."""
        wait_s = self.cores.busy_s(core)
        while turn := self._turn():
            oldest, model = turn
            limit_s = math.inf
            if not oldest.is_bulk:
                self._interactive_until_s = time.monotonic() + _INTERACTIVE_FOR_S
            elif time.monotonic() < self._interactive_until_s:
                if self.cores.idle < min(2, self.cores.left):
                    return None
                limit_s = _BULK_BATCH_LIMIT_S
            if oldest.lost_cores and not self.cores.is_idle(core):
                # Nothing runs beside it. Otherwise it would be unclear which of the two caused the loss of a core.
                return None
            model.queue.remove(oldest)
            if model.policy.can_wait(oldest, wait_s):
                if oldest.lost_cores:
                    return model, model.policy.batch_of([oldest])
                # One idle core is left to each other model that waits.
                others = sum(1 for other in self._models if other is not model and len(other.queue))
                return model, model.policy.fill(oldest, wait_s, max(1, self.cores.idle - others), limit_s)
        return None

    def _turn(self) -> tuple[QueuedSequence, ExecutorModel] | None:
        """The sequence that goes first, of all models.

        So no model can delay another for longer than by the work that came before.
        """
        heads = [(one.is_bulk, one, model) for model in self._models if (one := model.queue.oldest())]
        return min(heads, key=lambda head: head[:2])[1:] if heads else None

    async def _run_batch(self, core: int, model: ExecutorModel, batch: Batch) -> None:
        members = batch.members
        prepare, finish = model.work(batch)
        self._begin(core, model, batch)
        is_alone = (
            self.cores.idle == self.cores.left - 1
            and self.cores.running == 1
            and not any(len(other.queue) for other in self._models)
        )
        fault: Exception | None = None
        try:
            rows = await model.backend.run(core, prepare, finish, is_alone=is_alone and not model.has_whole_items)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            hung = self._watchdogs[core].hung
            if hung is None or self._is_closed or task is None:
                raise
            task.uncancel()
            fault = CoreLost(f"core {core} hangs", has_begun=hung is task)
        except Exception as error:  # whatever a back end raises must not end the core
            fault = error
        finally:
            started_ns, ended_ns = self._end(core, model)
        run = BatchRun(core, is_alone, batch.padded_tokens, batch.computed_tokens, started_ns, ended_ns)
        model.observer.batch(run, members, fault)
        if fault is None:
            model.forecast.observe(batch.computed_tokens, (ended_ns - started_ns) / 1e9, is_alone=is_alone)
            model.answer(core, batch, rows, started_ns, ended_ns)
        elif isinstance(fault, CoreLost):
            self.lose(core, model.spec.name, fault)
            self._give_back(model, members, fault)
        else:
            await self._run_alone(core, model, members, fault)

    def _begin(self, core: int, model: ExecutorModel, batch: Batch) -> None:
        expected_s = model.forecast.batch_s(batch.computed_tokens)
        self.cores.begin(core, expected_s, model.forecast, is_kept_apart=bool(batch.members[0].lost_cores))
        model.batches_running += 1
        self._watchdogs[core].begin(model.spec.name, max(self._batch_limit_s, _HANGS_AFTER * expected_s))

    def _end(self, core: int, model: ExecutorModel) -> tuple[int, int]:
        model.batches_running -= 1
        self._watchdogs[core].end()
        self._ended.set()
        return self.cores.end(core)

    async def _run_alone(
        self, core: int, model: ExecutorModel, members: list[QueuedSequence], fault: Exception
    ) -> None:
        """Runs each sequence of a failed batch by itself. A batch of one has found the bad sequence."""
        if len(members) > 1:
            for one in members:
                if self.cores.is_lost(core):
                    model.give_back(one)
                elif one.is_wanted(0):
                    await self._run_batch(core, model, model.policy.batch_of([one]))
            return
        (one,) = members
        ids = one.trace.ids if one.trace else {}
        log_fault("a sequence could not be computed", fault, model=model.spec.name, core=core, tokens=one.tokens, **ids)
        fail(members, uncomputable())

    def _give_back(self, model: ExecutorModel, members: list[QueuedSequence], fault: CoreLost) -> None:
        """Returns the sequences of a lost core to their queues."""
        for one in members:
            one.lost_cores += fault.has_begun
            if one.lost_cores >= _MAX_LOST_CORES:
                fail([one], uncomputable())
            else:
                model.give_back(one)
