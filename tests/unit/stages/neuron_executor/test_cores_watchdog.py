"""A batch that does not end: its core is given up, and what it had goes elsewhere. The callers set no deadlines."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError, Unavailable
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import BACKENDS, BackendEntry
from neuronpipe.stages.neuron_executor.backends.base import Finish, Prepare, ResultT
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from neuronpipe.stages.settings import EngineSettings
from tests.suite.constants import with_constants
from tests.suite.loop_clock import LoopClock
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor import held_backend
from tests.unit.stages.neuron_executor.held_backend import ENDLESS, HeldBackend
from tests.unit.stages.neuron_executor.scheduling import LIMITS, SPEC, KnownTime, System, joined, running, sequence

# Batches that hang are waited for so long; all others must end before, also beside other work.
_LIMIT_S = 0.5
# The limit of tests that move the clock instead of waiting.
_CLOCK_LIMIT_S = 100


class _HangingBackend(HeldBackend):
    """Cores in `hanging` never end their batches."""

    def __init__(self, cores: int, in_flight: int = 1) -> None:
        super().__init__(SPEC, cores=cores, in_flight=in_flight, is_held=False)
        self.hanging: set[int] = set()

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        if core in self.hanging:
            self.ran_on.append(core)
            await asyncio.Event().wait()
        return await super().compute(core, inputs, is_alone=is_alone)


@asynccontextmanager
async def _system(
    cores: int, in_flight: int = 1, batch_time: BatchTime | None = None, limit_s: float = _LIMIT_S
) -> AsyncIterator[tuple[System, _HangingBackend]]:
    device, backend = DeviceScheduler(cores, in_flight, batch_limit_s=limit_s), _HangingBackend(cores, in_flight)
    model = joined(device, backend, SPEC, LIMITS, batch_time or KnownTime(0, 0))
    async with asyncio.timeout(40 * limit_s), running(device):
        yield System(model, backend), backend


@pytest_asyncio.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    monkeypatch.setattr(held_backend, "_PATIENCE_S", None)  # the test's own limit suffices
    return LoopClock(monkeypatch)


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_what_a_hanging_core_had_is_computed_on_another(in_flight: int, caplog: pytest.LogCaptureFixture) -> None:
    async with _system(2, in_flight) as (system, backend):
        backend.hanging.add(0)
        callers = [system.submit([number]) for number in range(1, 9)]
        assert [len(answer) for answer in await asyncio.gather(*callers)] == [1] * 8
        assert system.scheduler.cores_left == 1
        before = len(backend.ran_on)
        await system.submit([11])
        assert backend.ran_on[before:] == [1]
    (record,) = (record for record in caplog.records if record.message == "core lost")
    assert "a batch did not end within 0.5 s" in caplog.text
    assert record.__dict__["fields"] == {"model": "small", "core": 0, "cores_left": 1}


async def test_a_sequence_that_makes_cores_hang_fails_at_the_second() -> None:
    async with _system(3) as (system, backend):
        with pytest.raises(InternalError):
            await system.submit([ENDLESS])
        assert sorted(backend.ran_on) == [0, 1]
        assert len(await system.submit([11])) == 1


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_where_the_last_core_hangs_all_who_wait_are_told_and_the_process_ends(in_flight: int) -> None:
    callers: list[asyncio.Task[list[ComputedSequence]]] = []

    async def hang() -> None:
        async with _system(1, in_flight) as (system, backend):
            backend.hanging.add(0)
            callers.extend(system.submit([number]) for number in range(1, 4))
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost):
        await hang()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 5)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}


async def test_a_batch_that_is_expected_to_take_longer_than_the_limit_is_waited_for(clock: LoopClock) -> None:
    batch_time = KnownTime(overhead_s=40, token_s=0)
    async with _system(1, batch_time=batch_time, limit_s=_CLOCK_LIMIT_S) as (system, backend):
        backend._is_held = True
        caller = system.submit([11])
        await backend.begun()
        await clock.run(390)  # ten times the expected time are not over
        assert system.scheduler.cores_left == 1
        backend.let_run()
        assert len(await caller) == 1


async def test_a_standstill_of_the_process_is_no_time_of_a_batch() -> None:
    async with _system(1) as (system, backend):
        backend._is_held = True
        caller = system.submit([11])
        await backend.begun()
        time.sleep(2 * _LIMIT_S)  # as if the process were stopped: the timer is due before the batch can end
        await asyncio.sleep(0.05)
        backend.let_run()
        assert len(await caller) == 1
        assert system.scheduler.cores_left == 1


async def test_the_time_of_a_batch_before_a_standstill_counts(clock: LoopClock) -> None:
    async with _system(2, limit_s=_CLOCK_LIMIT_S) as (system, backend):
        backend._is_held = True
        caller = system.submit([11])
        await backend.begun()
        await clock.run(95)
        await clock.jump(1000)
        assert system.scheduler.cores_left == 2
        await clock.run(20)
        assert system.scheduler.cores_left == 1
        backend.let_run()
        assert len(await caller) == 1


async def test_the_time_of_a_batch_made_ready_begins_with_the_end_of_the_one_before(clock: LoopClock) -> None:
    async with _system(1, in_flight=2, limit_s=_CLOCK_LIMIT_S) as (system, backend):
        backend._is_held = True
        first = system.submit([11])
        await backend.begun()
        second = system.submit([12])
        await backend.begun()
        for caller in first, second:
            await clock.run(90)
            backend.let_run(1)
            await caller
        assert system.scheduler.cores_left == 1


async def test_a_batch_that_hangs_is_found_though_the_one_behind_it_ends_first() -> None:
    callers: list[asyncio.Task[list[ComputedSequence]]] = []

    async def hang() -> None:
        async with _system(1, in_flight=2) as (system, backend):
            backend.hanging.add(0)
            callers.append(system.submit([1]))
            await happens(lambda: backend.ran_on == [0])
            backend.hanging.clear()
            callers.append(system.submit([11]))
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost):
        await hang()
    assert isinstance(callers[0].exception(), Unavailable)
    assert len(callers[1].result()) == 1


class _ThreadedBackend(HeldBackend):
    """Computes in a thread, as back ends do, where the first batch hangs until the test ends."""

    def __init__(self) -> None:
        super().__init__(SPEC, cores=2, is_held=False)
        self.threads, self.end, self.has_hung = ThreadPoolExecutor(2), threading.Event(), False

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        if not self.has_hung:
            self.has_hung = True
            await asyncio.get_running_loop().run_in_executor(self.threads, self.end.wait)
        return await super().run(core, prepare, finish, is_alone=is_alone)


async def test_a_thread_that_hangs_is_left_to_itself() -> None:
    device, backend = DeviceScheduler(2, 1, batch_limit_s=_LIMIT_S), _ThreadedBackend()
    model = joined(device, backend, SPEC, LIMITS, KnownTime(0, 0))
    try:
        async with asyncio.timeout(20), running(device):
            assert len(await model.run([sequence(11)], Call())) == 1
            assert model.cores_left == 1
    finally:
        backend.end.set()
        backend.threads.shutdown()


class _HangingWarm(FakeBackend):
    """Warms up, and hangs from then on when the test says so."""

    is_hanging = False

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        if self.is_hanging:
            await asyncio.Event().wait()
        return await super().compute(core, inputs, is_alone=is_alone)


async def test_the_limit_is_a_setting_and_with_the_last_core_the_executor_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "fake", BackendEntry(f"{__name__}:_HangingWarm", 0))
    write_bundle(tmp_path, model=model_spec(name="m"), artifacts=(Artifact(backend="fake", dtype="float32"),))
    callers: list[asyncio.Task[object]] = []

    async def hang() -> None:
        async with (
            running_devices(with_constants(EngineSettings, batch_limit_s=1), Telemetry()) as devices,
            devices.open_batches(read_bundle(tmp_path / "m/1")) as model,
        ):
            monkeypatch.setattr(_HangingWarm, "is_hanging", True)
            callers.append(asyncio.create_task(model.run([sequence(11)], Call())))
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost):
        await hang()
    assert isinstance(callers[0].exception(), Unavailable)


async def test_what_hangs_is_not_computed_again_where_its_caller_left() -> None:
    async with _system(2) as (system, backend):
        backend.hanging.update((0, 1))
        leaving = system.submit([11])
        await happens(lambda: len(backend.ran_on) == 1)
        leaving.cancel()
        backend.hanging.clear()
        await happens(lambda: system.scheduler.cores_left == 1)
        await system.submit([12])
        assert backend.batches == [[[12]]]
