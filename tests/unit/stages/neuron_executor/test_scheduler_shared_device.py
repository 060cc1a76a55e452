"""stages/neuron_executor/scheduler.py with several models on one device: turns, forecasts, and cores that are lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, Overloaded, Unavailable
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from tests.suite.fixed_clock import FixedClock
from tests.suite.waiting import cancelled
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.held_backend import HeldBackend
from tests.unit.stages.neuron_executor.jumping_time import JumpingLoop
from tests.unit.stages.neuron_executor.scheduling import (
    LIMITS,
    SPEC,
    KnownTime,
    System,
    joined,
    queued,
    running,
    tell_time,
)

_ONE_BY_ONE = Limits(max_batch_size=1, max_batch_tokens=1000, max_queue_sequences=8)


@asynccontextmanager
async def _two_models(
    *,
    cores: int = 1,
    in_flight: int = 1,
    limits: Limits = LIMITS,
    times: Sequence[BatchTime] = (KnownTime(0, 0), KnownTime(0, 0)),
    is_held: bool = True,
    device: DeviceScheduler | None = None,
) -> AsyncIterator[tuple[System, System]]:
    """Two models whose batches are noted in one list."""
    device = device or DeviceScheduler(cores, in_flight, batch_limit_s=60)
    backends = [HeldBackend(SPEC, cores=cores, in_flight=in_flight, is_held=is_held) for _ in times]
    for other in backends[1:]:
        other.batches, other.ran_on, other.lost = backends[0].batches, backends[0].ran_on, backends[0].lost
    one, two = (
        System(joined(device, backend, SPEC, limits, time), backend)
        for backend, time in zip(backends, times, strict=True)
    )
    async with running(device):
        yield one, two


class _SlowBackend(FakeBackend):
    """A device computes one batch at a time, of whichever model; a batch of this one takes so long."""

    def __init__(self, turn: asyncio.Lock, seconds: float, in_flight: int) -> None:
        super().__init__(BackendRequest(model_spec(), [], {}, cores=1, threads=0, in_flight=in_flight))
        self._turn, self._seconds = turn, seconds

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        async with self._turn:
            await asyncio.sleep(self._seconds)
        return await super().compute(core, inputs)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_time_of_a_batch_has_no_wait_for_another_model(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    loop = JumpingLoop()
    tell_time(monkeypatch, loop)

    async def simulate() -> list[tuple[float, float]]:
        turn, device = asyncio.Lock(), DeviceScheduler(1, in_flight, batch_limit_s=60)
        times = (BatchTime(), BatchTime())
        quick, slow = (
            joined(device, _SlowBackend(turn, seconds, in_flight), model_spec(), _ONE_BY_ONE, time)
            for seconds, time in zip((0.01, 0.1), times, strict=True)
        )
        async with running(device):
            arrays = [{"input_ids": np.ones(3, np.int32)}]
            for _ in range(10):
                both = await asyncio.gather(*(model.run(arrays, Call()) for _ in range(4) for model in (quick, slow)))
        return [
            (max((one.finished_ns - one.started_ns) / 1e9 for (one,) in found), time.token_s * 4)
            for found, time in ((both[::2], times[0]), (both[1::2], times[1]))
        ]

    try:
        (quick_s, quick_learned_s), (slow_s, slow_learned_s) = loop.run_until_complete(simulate())
    finally:
        loop.close()
    assert [quick_s, slow_s] == pytest.approx([0.01, 0.1])
    # All batches are of one length, whose time is taken for that of its four tokens or for overhead.
    assert quick_learned_s <= 0.0101
    assert slow_learned_s <= 0.101


async def test_a_core_computes_for_one_model_at_a_time() -> None:
    async with _two_models() as (one, two):
        await one.occupy()
        waiting = two.submit([11])
        await asyncio.sleep(0.05)  # nothing happens
        assert one.backend.batches == [[[500]]]
        one.backend.let_run()
        two.backend.let_run()
        await waiting


async def test_in_flight_counts_a_cores_batches_of_all_models() -> None:
    async with _two_models(in_flight=2, limits=_ONE_BY_ONE) as (one, two):
        await one.occupy()
        callers = [two.submit([11]), one.submit([12])]
        assert await two.backend.begun() == [[11]]
        await asyncio.sleep(0.05)  # nothing more happens
        assert len(one.backend.batches) == 2
        for system in one, two:
            system.backend.let_run()
        await asyncio.gather(*callers)


async def test_the_oldest_sequence_of_all_models_goes_first() -> None:
    async with _two_models(limits=_ONE_BY_ONE) as (one, two):
        await one.occupy()
        callers = [one.submit([1], [2]), two.submit([3]), one.submit([4], [5]), two.submit([6])]
        await queued()
        for system in one, two:
            system.backend.let_run()
        await asyncio.gather(*callers)
        assert one.backend.batches[1:] == [[[1]], [[2]], [[3]], [[4]], [[5]], [[6]]]


async def test_a_model_that_is_flooded_does_not_keep_another_from_its_turn() -> None:
    async with _two_models(limits=_ONE_BY_ONE, is_held=False) as (one, two):

        async def flood() -> None:
            while True:
                await one.submit([1])

        floods = [asyncio.create_task(flood()) for _ in range(4)]
        await queued()
        before = len(one.backend.batches)
        await two.submit([11])
        # Four were older at most, and one ran.
        assert one.backend.batches[before:].index([[11]]) <= 5
        await cancelled(*floods)


async def test_bulk_of_one_model_waits_for_interactive_work_of_another() -> None:
    async with _two_models(limits=_ONE_BY_ONE) as (one, two):
        await one.occupy()
        callers = [one.submit([1], [2], is_bulk=True), two.submit([3])]
        await queued()
        for system in one, two:
            system.backend.let_run()
        await asyncio.gather(*callers)
        assert one.backend.batches[1:] == [[[3]], [[1]], [[2]]]


async def test_idle_cores_are_shared_by_the_models_that_wait() -> None:
    async with _two_models(cores=2) as (one, two):
        await queued()
        one.submit([1], [2])
        two.submit([3], [4])
        assert await one.backend.begun() == [[1], [2]]
        assert await two.backend.begun() == [[3], [4]]


async def test_a_deadline_takes_what_waits_for_another_model_into_account(clock: FixedClock) -> None:
    async with _two_models(times=(KnownTime(0, 1), KnownTime(0, 10))) as (one, two):
        await one.occupy()
        two.submit([1, 1, 1])
        await queued()
        # Forty seconds for what waits, and two of its own.
        with pytest.raises(DeadlineExceeded, match="in the executor's queue"):
            await one.submit([21], deadline_s=clock.now_s + 42)
        in_time = one.submit([21], deadline_s=clock.now_s + 42.1)
        await queued()
        assert not in_time.done()


async def test_a_deadline_takes_the_batch_that_runs_for_another_model_into_account(clock: FixedClock) -> None:
    async with _two_models(times=(KnownTime(0, 10), KnownTime(0, 1))) as (one, two):
        await one.occupy()  # twenty seconds
        clock.now_s += 5
        with pytest.raises(DeadlineExceeded):
            await two.submit([21], deadline_s=clock.now_s + 17)
        in_time = two.submit([21], deadline_s=clock.now_s + 17.1)
        await queued()
        assert not in_time.done()


async def test_interactive_work_is_not_refused_for_the_sake_of_another_models_bulk(clock: FixedClock) -> None:
    async with _two_models(cores=2, times=(KnownTime(0, 1), KnownTime(0, 10))) as (one, two):
        await one.occupy()
        clock.now_s += 1  # no interactive work is expected
        two.submit([1, 1, 1], is_bulk=True)
        await two.backend.begun()
        two.submit([2, 2, 2], is_bulk=True)
        await queued()
        in_time = one.submit([21], deadline_s=clock.now_s + 2.1)
        await queued()
        assert not in_time.done()


async def test_who_is_refused_is_told_to_wait_for_other_models_as_well() -> None:
    limits = Limits(max_batch_size=8, max_batch_tokens=1000, max_queue_sequences=2)
    async with _two_models(limits=limits, times=(KnownTime(5, 1), KnownTime(0, 10))) as (one, two):
        await one.occupy()
        one.submit([1], [2])
        two.submit([1, 1, 1])
        await queued()
        with pytest.raises(Overloaded) as caught:
            await one.submit([21])
        # Four tokens of a second, and four of ten.
        assert caught.value.retry_after_s == pytest.approx(44)


async def test_a_core_that_one_model_lost_is_lost_for_all() -> None:
    async with _two_models(cores=2, is_held=False) as (one, two):
        one.backend.lost.add(0)
        while one.scheduler.cores_left != 1:
            await one.submit([1])
        before = len(one.backend.ran_on)
        assert two.scheduler.cores_left == 1
        for _ in range(5):
            await two.submit([2])
        assert set(one.backend.ran_on[before:]) == {1}


async def test_with_the_last_core_whoever_waits_for_any_model_is_told() -> None:
    callers = []

    async def lose_the_last_core() -> None:
        async with _two_models() as (one, two):
            callers.append(await one.occupy())
            callers.extend((one.submit([1]), two.submit([2])))
            await queued()
            one.backend.lost.add(0)
            one.backend.let_run()
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost, match="no core is left for the model 'small', 'small'"):
        await lose_the_last_core()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 5)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}


async def test_cores_that_are_reserved_compute_nothing_else_and_others_go_on() -> None:
    device = DeviceScheduler(2, 2, batch_limit_s=60)
    backend = HeldBackend(SPEC, cores=2, in_flight=2, is_held=False)
    system = System(joined(device, backend, SPEC, _ONE_BY_ONE, KnownTime(0, 0)), backend)
    async with running(device), asyncio.timeout(20):
        async with device.reserved([0]):
            await asyncio.gather(*(system.submit([number]) for number in range(1, 7)))
            assert set(backend.ran_on) == {1}
            async with asyncio.timeout(5):
                await system.submit([7])
        async with device.reserved([0, 1]):
            waiting = system.submit([8])
            await asyncio.sleep(0.05)  # nothing happens
            assert not waiting.done()
        await waiting


async def test_a_model_that_leaves_ends_its_batches_and_tells_who_waits_while_others_go_on() -> None:
    device = DeviceScheduler(1, 1, batch_limit_s=60)
    async with _two_models(device=device) as (one, two):
        running_one = await one.occupy()
        waiting, staying = one.submit([1]), two.submit([2])
        await queued()
        leaving = asyncio.create_task(device.remove_model(one.scheduler))
        with pytest.raises(Unavailable):
            await waiting
        assert not leaving.done()
        one.backend.let_run()
        await leaving
        assert len(await running_one) == 1
        two.backend.let_run()
        assert len(await staying) == 1
        with pytest.raises(Unavailable):
            await one.submit([3])
        assert device.shared.forecasts == [two.scheduler.forecast]
