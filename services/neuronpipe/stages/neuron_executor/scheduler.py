"""Runs waiting sequences in batches on the cores of one device, which its models share.

The worker of a free core decides which model is next: the model with the interactive sequence of lowest rank
(QueueRank), or else with the bulk sequence of lowest rank. The policy of that model then takes a batch out of its queue
(batching.py), without waiting for more sequences, and the worker runs the batch, see `_run_batch`. While interactive
sequences come, bulk leaves one core idle, and bulk batches are short. After a batch failed, its sequences run again one
at a time, so that one bad sequence fails alone. A core that is lost, or hangs, gets no more work, and its sequences
return to the queues. The scheduler knows no transport and no task.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from neuronpipe.core.logs import log_fault
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.batch_observer import BatchRun
from neuronpipe.stages.neuron_executor.batching import Batch
from neuronpipe.stages.neuron_executor.cores import Cores, CoresLost, CoreWatchdog
from neuronpipe.stages.neuron_executor.errors import stopping, uncomputable
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel, SharedDevice, fail
from neuronpipe.stages.neuron_executor.sequence_queue import QueuedSequence

# A sequence fails when this number of cores was lost while they computed it, because it may be the reason. After the
# first loss it runs alone, so that no other sequence fails with it.
_MAX_LOST_CORES = 2
# A batch hangs when it takes longer than this multiple of its forecast, and longer than the configured limit.
_HANGS_AFTER = 10
# After an interactive sequence, others are expected for this time. Until then, bulk batches grow only up to the
# limit. With four callers and a flood of jobs on two CPUs, the callers' p99 was 1.12 times the p99 without jobs, and
# 2.09 times without this rule (2026-11-22).
_INTERACTIVE_FOR_S = 0.25
_BULK_BATCH_LIMIT_S = 0.006


class DeviceScheduler:
    """Owns the cores of a device and its models. Its owner runs `workers`, and closes it when they have ended."""

    def __init__(self, cores: int, in_flight: int, batch_limit_s: float) -> None:
        """`in_flight`: batches that a core gets at once. `batch_limit_s`: time after which a batch's core is lost."""
        self.cores = Cores(cores)
        # For the constructors of models, which know nothing else of the device.
        self.shared = SharedDevice(self.cores)
        self._in_flight = in_flight
        self._batch_limit_s = batch_limit_s
        self._models: list[ExecutorModel] = []
        self._has_work = self.shared.has_work
        self._ended = asyncio.Event()
        self._reserved: frozenset[int] = frozenset()
        self._reserving = asyncio.Lock()
        # A core that hangs is lost. Its workers return its sequences to the queues. Its hanging thread is abandoned.
        self._watchdogs = [CoreWatchdog(partial(self.lose, core)) for core in range(cores)]
        self._interactive_until_s = -math.inf
        self._batches_ended = 0
        self._is_closed = False

    def workers(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutines that run as long as the device is used. They raise CoresLost."""
        return [self._work(core) for _ in range(self._in_flight) for core in range(self.cores.count)]

    def add_model(self, model: ExecutorModel) -> None:
        """Adds a model that was made with the device's shared parts."""
        self._models.append(model)
        self.shared.forecasts.append(model.forecast)

    async def remove_model(self, model: ExecutorModel) -> None:
        """Removes a model: ends its waiting requests, and waits for its running batches."""
        model.close()
        while model.batches_running:
            self._ended.clear()
            await self._ended.wait()
        self._models.remove(model)
        self.shared.forecasts.remove(model.forecast)
        model.observer.unwatch()

    def close(self) -> None:
        """Takes no more sequences, for any model."""
        self._is_closed = True
        for model in self._models:
            model.close()

    @property
    def is_idle(self) -> bool:
        """Whether no batch runs or waits."""
        return not self.cores.running and not any(len(model.queue) for model in self._models)

    async def idle(self, seconds: float) -> None:
        """Waits until no batch has run or waited for a number of seconds."""
        while True:
            ended_before = self._batches_ended
            await asyncio.sleep(seconds)
            if self.is_idle and self._batches_ended == ended_before:
                return

    @asynccontextmanager
    async def reserved(self, cores: Collection[int]) -> AsyncIterator[None]:
        """Reserves cores for the block, so that a model can warm up while other models are served.

        Raises CoreLost if the block takes longer than a batch may.
        """
        async with self._reserving:
            self._reserved = frozenset(cores)
            try:
                while not all(map(self.cores.is_idle, cores)):
                    self._ended.clear()
                    await self._ended.wait()
                for core in cores:
                    self.cores.begin_batch(core, 0)
                try:
                    async with asyncio.timeout(self._batch_limit_s) as limit:
                        yield
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise CoreLost(f"a batch did not end within {self._batch_limit_s:g} s") from error
                finally:
                    for core in cores:
                        self.cores.end_batch(core)
            finally:
                self._reserved = frozenset()
                self._has_work.set()

    def lose(self, core: int, model_name: str, fault: CoreLost) -> None:
        """Marks a core as lost, for all models."""
        if self.cores.lose(core):
            log_fault("core lost", fault, model=model_name, core=core, cores_left=self.cores.left)
        self._has_work.set()  # the core's workers end, and other cores may now take batches ahead

    async def _work(self, core: int) -> None:
        """Runs batches on one core until it is lost. Each batch in flight has its worker. Raises CoresLost."""
        while taken := await self._next_batch(core):
            model, batch = taken
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
        """Waits for a batch of any model; None if the core is lost."""
        while not self.cores.is_lost(core):
            if core not in self._reserved and self.cores.may_take(core) and (taken := self._take(core)):
                if self._in_flight > 1 or taken[1].is_bulk:
                    self._has_work.set()  # other cores may take the sequences that this batch has left
                return taken
            self._has_work.clear()
            await self._has_work.wait()
        return None

    def _take(self, core: int) -> tuple[ExecutorModel, Batch] | None:
        """Takes the next batch for a core out of the queue of its model; None if there is none for it."""
        wait_s = self.cores.busy_s(core)
        while turn := self._turn():
            oldest, model = turn
            limit_s: float | None = math.inf
            if oldest.is_bulk:
                limit_s = self._bulk_limit_s()
            else:
                self._interactive_until_s = time.monotonic() + _INTERACTIVE_FOR_S
            # A suspect runs without other batches on its core. Otherwise the cause of a loss would be unclear.
            if limit_s is None or (oldest.lost_cores and not self.cores.is_idle(core)):
                return None
            # Each other model with waiting sequences keeps one idle core.
            other_models = sum(1 for other in self._models if other is not model and len(other.queue))
            if batch := model.take(oldest, wait_s, max(1, self.cores.idle - other_models), limit_s):
                return model, batch
        return None

    def _bulk_limit_s(self) -> float | None:
        """Returns the limit of a bulk batch that begins now; None if the idle core stays free for interactive work."""
        if time.monotonic() >= self._interactive_until_s:
            return math.inf
        return None if self.cores.idle < min(2, self.cores.left) else _BULK_BATCH_LIMIT_S

    def _turn(self) -> tuple[QueuedSequence, ExecutorModel] | None:
        """Finds the first sequence of all models, by priority and rank, and its model.

        So a model delays another model only by work of higher priority or lower rank.
        """
        heads = [(oldest.is_bulk, oldest, model) for model in self._models if (oldest := model.queue.oldest())]
        return min(heads, key=lambda head: head[:2])[1:] if heads else None

    async def _run_batch(self, core: int, model: ExecutorModel, batch: Batch) -> None:
        """Runs a batch that has left the queue, until each of its sequences has its result or waits again.

        The back end makes inputs of the sequences, computes them, and makes rows of the outputs. Then the callers get
        their rows. If the core was lost, the sequences return to the queue. After another fault each runs alone.
        """
        is_alone = self.is_idle and model.may_use_all_cores
        computing = model.compute(core, batch, is_alone=is_alone)
        fault: Exception | None = None
        expected_s, watchdog = model.begin_batch(batch), self._watchdogs[core]
        self.cores.begin_batch(core, expected_s, model.forecast, is_kept_apart=bool(batch.members[0].lost_cores))
        watchdog.begin_batch(model.spec.name, max(self._batch_limit_s, _HANGS_AFTER * expected_s))
        try:
            rows = await computing
        except asyncio.CancelledError:
            if self._is_closed or not (fault := watchdog.end_cancellation()):
                raise
        except Exception as error:  # no error of a back end may end the core's worker
            fault = error
        finally:
            watchdog.end_batch()
            model.end_batch()
            self._batches_ended += 1
            self._ended.set()
            started_ns, ended_ns = self.cores.end_batch(core)
        run = BatchRun(batch, core, is_alone=is_alone, started_ns=started_ns, ended_ns=ended_ns)
        model.observer.batch(run, fault)
        if fault is None:
            model.answer(run, rows)
        elif isinstance(fault, CoreLost):
            self.lose(core, model.spec.name, fault)
            self._requeue(model, batch.members, fault)
        else:
            await self._run_alone(core, model, batch.members, fault)

    async def _run_alone(
        self, core: int, model: ExecutorModel, members: list[QueuedSequence], fault: Exception
    ) -> None:
        """Runs each sequence of a failed batch by itself. A failed batch of one sequence has found the bad sequence."""
        if len(members) == 1:
            model.give_up(members[0], core, fault)
            return
        for member in members:
            if self.cores.is_lost(core):
                model.requeue(member)
            elif not member.expire_if_late(0):
                await self._run_batch(core, model, model.policy.batch_of([member]))

    def _requeue(self, model: ExecutorModel, members: list[QueuedSequence], fault: CoreLost) -> None:
        """Returns the sequences of a lost core to the queue, except those that may be the reason for the loss."""
        for member in members:
            member.lost_cores += fault.has_begun
            if member.lost_cores >= _MAX_LOST_CORES:
                fail([member], uncomputable())
            else:
                model.requeue(member)
