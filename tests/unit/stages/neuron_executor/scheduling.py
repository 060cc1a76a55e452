"""A scheduler on a back end that holds every batch until the test lets it run."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Arrays
from neuronpipe.platform.process.background import run_beside
from neuronpipe.stages.neuron_executor.backends.base import Backend
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.forecast import BatchTime, BatchTimes
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from tests.suite.fixed_clock import FixedClock
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.held_backend import HeldBackend

SPEC = model_spec("question_answering")


def limits(max_batch_size: int = 8, max_batch_tokens: int = 1000, max_queue_sequences: int = 8) -> Limits:
    """Limits that a test reaches with few sequences."""
    return Limits(max_batch_size, max_batch_tokens, max_queue_sequences)


LIMITS = limits()


def sequence(*ids: int) -> Arrays:
    return {"input_ids": np.array(ids, np.int32)}


class KnownTime(BatchTime):
    """Batches take exactly this long, whatever is observed."""

    def __init__(self, overhead_s: float, token_s: float) -> None:
        super().__init__()
        self._known = overhead_s, token_s
        for tokens in (1, 101):
            self.anchor(tokens, self.seconds(tokens))

    def observe(self, tokens: int, seconds: float) -> None:
        pass

    def seconds(self, tokens: int) -> float:
        overhead_s, token_s = self._known
        return overhead_s + token_s * tokens


def tell_time(monkeypatch: pytest.MonkeyPatch, clock: object) -> None:
    """Makes a clock the one that the scheduler and its parts see."""
    for module in ("batching", "cores", "executor_model", "forecast", "scheduler", "sequence_queue"):
        monkeypatch.setattr(f"neuronpipe.stages.neuron_executor.{module}.time", clock)


@dataclass
class System:
    scheduler: ExecutorModel
    backend: HeldBackend

    def submit(
        self, *sequences: Sequence[int], deadline_s: float | None = None, is_bulk: bool = False
    ) -> asyncio.Task[list[ComputedSequence]]:
        """One caller with the sequences of one input."""
        priority = Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE
        call = Call(deadline_s=deadline_s, priority=priority)
        return asyncio.create_task(self.scheduler.run([sequence(*ids) for ids in sequences], call))

    async def occupy(self) -> asyncio.Task[list[ComputedSequence]]:
        """A caller whose batch of its own holds the core until the test lets it run."""
        caller = self.submit([500])
        assert await self.backend.begun() == [[500]]
        return caller

    async def finish(self, *callers: asyncio.Task[list[ComputedSequence]]) -> list[list[ComputedSequence]]:
        """The answers of callers who are queued, or have just left, once the core is let run."""
        await queued()
        self.backend.let_run()
        return await asyncio.gather(*callers)


def joined(
    device: DeviceScheduler,
    backend: Backend,
    spec: ModelSpec,
    limits: Limits,
    batch_time: BatchTime,
    lone_batch_time: BatchTime | None = None,
    observer: BatchObserver | None = None,
    model_class: type[ExecutorModel] = ExecutorModel,
) -> ExecutorModel:
    """A model on a device."""
    observer = observer or BatchObserver(Telemetry(), spec, "", backend.cores)
    times = BatchTimes(batch_time, lone_batch_time or batch_time)
    model = model_class(backend, spec, limits, device.shared, times, observer)
    device.add_model(model)
    return model


@asynccontextmanager
async def running(device: DeviceScheduler) -> AsyncIterator[None]:
    """The cores of a device at work."""
    try:
        async with run_beside(*device.workers()):
            yield
    finally:
        device.close()


@asynccontextmanager
async def running_model(
    backend: Backend,
    spec: ModelSpec,
    limits: Limits,
    batch_time: BatchTime,
    lone_batch_time: BatchTime | None = None,
    observer: BatchObserver | None = None,
    lost: Collection[int] = (),
    model_class: type[ExecutorModel] = ExecutorModel,
) -> AsyncIterator[ExecutorModel]:
    """A model on a device of its own; `lost`: cores that are lost already."""
    device = DeviceScheduler(backend.cores, backend.in_flight, batch_limit_s=60)
    for core in lost:
        device.cores.lose(core)
    model = joined(device, backend, spec, limits, batch_time, lone_batch_time, observer, model_class)
    async with running(device):
        yield model


@asynccontextmanager
async def held_scheduler(
    *,
    cores: int = 1,
    limits: Limits = LIMITS,
    spec: ModelSpec = SPEC,
    is_held: bool = True,
    batch_time: BatchTime | None = None,
    lone_batch_time: BatchTime | None = None,
    in_flight: int = 1,
    buckets: Sequence[str] = (),
    menu: ShapeMenu | None = None,
    model_class: type[ExecutorModel] = ExecutorModel,
) -> AsyncIterator[System]:
    """Without a `batch_time` nothing is known of it: lengths share a batch as if padding cost nothing, and no wait is
    foreseen.
    """
    plan = tuple(parse_bucket(bucket) for bucket in buckets)
    backend = HeldBackend(spec, cores=cores, is_held=is_held, in_flight=in_flight, buckets=plan, menu=menu)
    times = batch_time or KnownTime(0, 0), lone_batch_time
    async with running_model(backend, spec, limits, *times, model_class=model_class) as scheduler:
        yield System(scheduler, backend)


async def queued(*callers: asyncio.Task[list[ComputedSequence]]) -> None:
    """Lets callers that were made just now reach the queue, or leave it."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


Submits = Callable[[System], asyncio.Task[list[ComputedSequence]]]


def call(*sequences: Sequence[int], **options: Any) -> Submits:
    """A caller for `batches_of`; see System.submit."""
    return lambda system: system.submit(*sequences, **options)


async def batches_of(
    *calls: Submits, clock: FixedClock | None = None, wait_s: float = 0, fails: Collection[int] = (), **options: Any
) -> list[list[list[int]]]:
    """The batches of callers who come while the core is busy, and wait. `fails`: those whose deadline passes."""
    async with occupied_scheduler(**options) as system:
        callers = [one(system) for one in calls]
        await queued()
        if clock:
            clock.now_s += wait_s
        system.backend.let_run()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        errors = {number: type(one) for number, one in enumerate(outcomes) if isinstance(one, BaseException)}
        assert errors == dict.fromkeys(fails, DeadlineExceeded)
        return system.backend.batches[1:]


@asynccontextmanager
async def occupied_scheduler(**options: Any) -> AsyncIterator[System]:
    """As held_scheduler, with a batch that holds the core until the test lets it run."""
    async with held_scheduler(**options) as system:
        await system.occupy()
        yield system
