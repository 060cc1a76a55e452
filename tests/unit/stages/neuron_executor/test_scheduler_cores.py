"""stages/neuron_executor/scheduler.py with several batches in flight, and with cores that are lost."""

import asyncio
from collections import defaultdict

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InternalError, Unavailable
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from tests.suite.fixed_clock import FixedClock
from tests.suite.waiting import happens
from tests.unit.stages.neuron_executor.held_backend import FAILING, KILLING, HeldBackend
from tests.unit.stages.neuron_executor.scheduling import (
    LIMITS,
    SPEC,
    KnownTime,
    System,
    held_scheduler,
    joined,
    occupied_scheduler,
    queued,
    running_model,
    sequence,
)

_ONE_BY_ONE = Limits(max_batch_size=1, max_batch_tokens=1000, max_queue_sequences=8)


async def test_the_next_batch_is_handed_to_a_core_that_works_where_two_are_in_flight() -> None:
    async with occupied_scheduler(in_flight=2) as system:
        waiting = system.submit([11])
        assert await system.backend.begun() == [[11]]
        system.backend.let_run()
        await waiting


async def test_a_core_takes_no_second_batch_while_another_core_is_idle() -> None:
    async with held_scheduler(cores=2, in_flight=2) as system:
        callers = []
        for number in (1, 2):
            callers.append(system.submit([number]))
            await system.backend.begun()
        assert sorted(system.backend.ran_on[:2]) == [0, 1]
        system.backend.let_run()
        await asyncio.gather(*callers)


async def test_what_a_lost_core_had_is_computed_on_another() -> None:
    async with held_scheduler(cores=2) as system:
        lost = await system.occupy()
        system.backend.lost.add(system.backend.ran_on[0])
        system.backend.let_run()
        (computed,) = await lost
        assert computed.batch_size == 1
        assert system.backend.ran_on == [0, 1]


async def test_a_lost_core_gets_no_more() -> None:
    async with held_scheduler(cores=2, is_held=False) as system:
        system.backend.lost.add(0)
        for number in range(1, 6):
            await system.submit([number])
        assert system.backend.ran_on.count(0) <= 1


async def test_a_sequence_that_loses_cores_fails_at_the_second_and_takes_no_others_along() -> None:
    async with held_scheduler(cores=3) as system:
        await queued()
        blocked = [system.submit([1]), system.submit([2]), system.submit([3])]
        for _ in blocked:
            await system.backend.begun()
        guilty, mates = system.submit([KILLING]), system.submit([11], [12])
        await queued()
        system.backend.let_run()
        with pytest.raises(InternalError):
            await guilty
        assert len(await mates) == 2
        assert len(system.backend.lost) == 2
        await asyncio.gather(*blocked)


async def test_the_time_of_a_batch_begins_when_its_core_is_free_for_it(clock: FixedClock) -> None:
    batch_time = BatchTime()
    async with held_scheduler(in_flight=2, batch_time=batch_time) as system:
        first = await system.occupy()
        second = system.submit([11])
        await system.backend.begun()
        for caller in first, second:
            clock.now_s += 3
            system.backend.let_run(1)
            await caller
        # Both take three seconds, the second from when the first has ended; the margin of error is on top.
        assert [(one.finished_ns - one.started_ns) / 1e9 for one in (*first.result(), *second.result())] == [3, 3]
        assert 3 <= batch_time.seconds(2) <= 3 * 1.5


async def test_what_would_end_too_late_behind_the_batch_that_runs_is_not_made_ready(clock: FixedClock) -> None:
    async with occupied_scheduler(in_flight=2, batch_time=KnownTime(overhead_s=10, token_s=0)) as system:
        late, in_time = system.submit([1], deadline_s=clock.now_s + 19), system.submit([2], deadline_s=clock.now_s + 21)
        assert await system.backend.begun() == [[2]]
        system.backend.let_run()
        await in_time
        with pytest.raises(DeadlineExceeded):
            await late


async def test_a_core_that_was_lost_before_a_batch_began_is_not_held_against_its_sequences() -> None:
    async with held_scheduler(cores=3, is_held=False) as system:
        system.backend.lost_before.update((0, 1))
        for number in range(1, 6):
            await system.submit([number])
        assert system.scheduler.cores_left == 1 or not {0, 1} <= set(system.backend.ran_on)
        assert system.backend.ran_on[-1] == 2


@pytest.mark.parametrize("buckets", [(), ("1x4", "4x4")], ids=["any shape", "buckets"])
async def test_sequences_that_a_core_was_lost_with_join_no_batch(buckets: tuple[str, ...]) -> None:
    async with held_scheduler(cores=3, buckets=buckets) as system:
        busy = await system.occupy()
        older = system.submit([1])
        await system.backend.begun()
        callers = [system.submit([11]), system.submit([12])]
        assert await system.backend.begun() == [[11], [12]]
        _, first, second = system.backend.ran_on
        system.backend.lost_before.add(first)  # so that the oldest comes back unsuspected
        system.backend.lost.add(second)
        system.backend.let_run()
        await asyncio.gather(busy, older, *callers)
        assert system.backend.batches[3:] == [[[1]], [[11]], [[12]]]


class _CountingBackend(HeldBackend):
    """Notes with how many others on its core a sequence that kills cores was handed over, and those handed over while
    it was there.
    """

    def __init__(self) -> None:
        super().__init__(SPEC, cores=3, in_flight=2, is_held=False)
        self.running: list[tuple[int, bool]] = []
        self.beside: list[int] = []

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        is_killing = bool((inputs["input_ids"] == KILLING).any())
        self.running.append((core, is_killing))
        others = [other for other in self.running if other[0] == core]
        if any(is_killing for _, is_killing in others):
            self.beside.append(len(others) - 1)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            return await super().compute(core, inputs, is_alone=is_alone)
        finally:
            self.running.remove((core, is_killing))


async def test_what_a_core_may_have_been_lost_through_runs_with_nothing_beside_it() -> None:
    backend = _CountingBackend()
    limits = Limits(max_batch_size=1, max_batch_tokens=1000, max_queue_sequences=100)
    async with running_model(backend, SPEC, limits, KnownTime(0, 0)) as scheduler:
        callers = [
            asyncio.create_task(scheduler.run([sequence(KILLING if number == 9 else number)], Call()))
            for number in range(1, 40)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 20)
    found = [type(outcome) for outcome in outcomes]
    assert found == [InternalError if number == 9 else list for number in range(1, 40)]
    # The first time beside whatever was there and came, the second time alone.
    assert backend.beside[-1] == 0
    assert len(backend.lost) == 2


class _GatedBackend(HeldBackend):
    """Each batch waits at a gate of its own, known by the first ids of its rows."""

    def __init__(self) -> None:
        super().__init__(SPEC, cores=2, in_flight=2, is_held=False)
        self.gates: defaultdict[tuple[int, ...], asyncio.Event] = defaultdict(asyncio.Event)
        self.at: dict[tuple[int, ...], int] = {}

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        batch = tuple(inputs["input_ids"][:, 0].tolist())
        self.at[batch] = core
        await self.gates[batch].wait()
        return await super().compute(core, inputs, is_alone=is_alone)


async def test_what_is_left_of_a_failed_batch_wakes_the_other_core_where_its_own_is_lost_meanwhile() -> None:
    backend = _GatedBackend()
    async with asyncio.timeout(20), running_model(backend, SPEC, LIMITS, KnownTime(0, 0)) as scheduler:

        async def call(*numbers: int) -> list[asyncio.Task[list[ComputedSequence]]]:
            callers = [asyncio.create_task(scheduler.run([sequence(number)], Call())) for number in numbers]
            await happens(lambda: numbers in backend.at)
            return callers

        (busy,) = await call(500)
        failing, *left = await call(FAILING, 11, 12)
        ahead = [caller for number in (21, 22) for caller in await call(number)]  # one for each core
        backend.gates[FAILING, 11, 12].set()
        await happens(lambda: (FAILING,) in backend.at)  # again, by itself
        lost = backend.at[FAILING,]
        backend.lost_before.add(lost)
        for number in 500, 21, 22:
            backend.gates[number,].set()
        await asyncio.gather(busy, *ahead)  # the one that the core had ahead is computed on the other
        backend.lost_before.clear()
        backend.gates[11, 12].set()
        await asyncio.sleep(0.05)  # the other core has nothing to do, and sleeps
        backend.gates[FAILING,].set()
        with pytest.raises(InternalError):
            await failing
        await asyncio.gather(*left)
        assert backend.ran_on[-1] != lost


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_with_the_last_core_all_who_wait_are_told_and_the_scheduler_ends(in_flight: int) -> None:
    made: list[System] = []
    callers = []

    async def lose_the_last_core() -> None:
        async with held_scheduler(in_flight=in_flight, limits=_ONE_BY_ONE) as system:
            made.append(system)
            callers.append(await system.occupy())
            callers.extend(system.submit([number]) for number in range(1, 6))
            for _ in range(in_flight - 1):
                await system.backend.begun()
            system.backend.lost.add(0)
            system.backend.let_run()
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost, match="no core is left for the model 'small'"):
        await lose_the_last_core()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 5)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}
    with pytest.raises(Unavailable):
        await made[0].submit([11])


async def test_the_worker_that_finds_no_core_left_tells_who_waits_and_the_others_end_in_peace() -> None:
    device = DeviceScheduler(1, 2, batch_limit_s=60)
    model = joined(device, HeldBackend(SPEC, in_flight=2), SPEC, LIMITS, KnownTime(0, 0))
    waiting = asyncio.create_task(model.run([sequence(1)], Call()))
    await queued()
    device.cores.lose(0)
    ended = await asyncio.gather(*device.workers(), return_exceptions=True)
    assert [type(one) for one in ended] == [CoresLost, type(None)]
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 5)


async def test_the_last_core_may_be_lost_while_a_failed_batch_is_run_again() -> None:
    callers = []

    async def lose_the_last_core() -> None:
        async with held_scheduler(in_flight=2) as system:
            callers.append(await system.occupy())
            callers.extend((system.submit([FAILING]), system.submit([11]), system.submit([12])))
            assert await system.backend.begun() == [[FAILING], [11], [12]]
            system.backend.let_run(2)
            assert await system.backend.begun() == [[FAILING]]
            system.backend.lost.add(0)
            system.backend.let_run()
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost):
        await lose_the_last_core()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers[1:], return_exceptions=True), 5)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}


async def test_cores_that_are_lost_already_get_nothing_and_are_not_counted() -> None:
    telemetry = Telemetry()
    observer = BatchObserver(telemetry, SPEC, "fake", cores=3)
    backend = HeldBackend(SPEC, cores=3, is_held=False)
    async with running_model(backend, SPEC, LIMITS, BatchTime(), observer=observer, lost={0, 2}) as scheduler:
        await asyncio.gather(*(scheduler.run([sequence(number)], Call()) for number in range(1, 6)))
        assert set(backend.ran_on) == {1}
        (family,) = (family for family in telemetry.meters.families() if family.instrument is Metrics.CORES)
        assert [family.number(series) for series in family.series.values()] == [1]
