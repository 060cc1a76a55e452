"""neuron_executor/scheduler.py with buckets, with several batches in flight, and with cores that are lost."""

import asyncio

import pytest

from neuronpipe.core.errors import InternalError, InvalidInput
from neuronpipe.neuron_executor.choosing import Limits
from neuronpipe.neuron_executor.scheduler import CoresLost
from tests.unit.model_specs import model_spec
from tests.unit.neuron_executor.held_backend import FAILING, KILLING
from tests.unit.neuron_executor.scheduling import KnownTime, System, held_scheduler, queued

# A bucket of four takes as long as it computes, and as two buckets of one.
_BUCKETS = ("1x4", "4x4", "1x8", "4x8")
_TIME = {"overhead_s": 16.0, "token_s": 1.0}


async def test_a_batch_has_no_more_sequences_than_its_bucket() -> None:
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(**_TIME)) as system:
        await system.occupy()
        callers = [system.submit([number]) for number in range(1, 6)]
        await queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1], [2], [3], [4]], [[5]]]


async def test_a_large_bucket_is_not_used_for_few_sequences() -> None:
    # Both: 32 s for two in 4x4, 20 s for one in 1x4. A token costs so much that empty rows are worse than batches of their own.
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(overhead_s=1, token_s=1)) as system:
        await system.occupy()
        callers = [system.submit([number]) for number in range(1, 3)]
        await queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1]], [[2]]]


async def test_shorter_sequences_take_rows_that_would_stay_empty_and_longer_ones_do_not_join() -> None:
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(**_TIME)) as system:
        await system.occupy()
        callers = [system.submit([1] * 8), system.submit([2] * 8, [3] * 8), system.submit([4], [5])]
        await queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1] * 8, [2] * 8, [3] * 8, [4]], [[5]]]


async def test_a_short_sequence_does_not_wait_in_a_long_batch_while_its_own_comes_first() -> None:
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(**_TIME)) as system:
        await system.occupy()
        callers = [system.submit([1]), system.submit([2] * 8)]
        await queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1]], [[2] * 8]]


async def test_idle_cores_share_what_waits_for_a_bucket() -> None:
    async with held_scheduler(cores=2, buckets=_BUCKETS, batch_time=KnownTime(**_TIME)) as system:
        await queued()
        system.submit([1], [2], [3], [4])
        assert await system.backend.begun() == [[1], [2]]
        assert await system.backend.begun() == [[3], [4]]


async def test_limits_of_a_batch_do_not_apply_to_buckets() -> None:
    limits = Limits(max_batch_size=1, max_batch_tokens=1, max_queue_sequences=8)
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(**_TIME), limits=limits) as system:
        await system.occupy()
        caller = system.submit([1], [2], [3])
        await queued()
        system.backend.let_run()
        await caller
        assert system.backend.batches[1:] == [[[1], [2], [3]]]


async def test_a_sequence_longer_than_the_largest_bucket_is_refused_by_its_name() -> None:
    spec = model_spec("question_answering", max_tokens=8, largest_bucket="4x8")
    async with held_scheduler(buckets=_BUCKETS, spec=spec) as system:
        with pytest.raises(InvalidInput, match=r"9 tokens, the model takes 1 to 8 \(its largest bucket is 4x8\)"):
            await system.submit([1] * 9)


async def test_a_failing_sequence_in_a_bucket_fails_alone() -> None:
    async with held_scheduler(buckets=_BUCKETS, batch_time=KnownTime(**_TIME), is_held=False) as system:
        guilty, innocent = system.submit([FAILING]), system.submit([1], [2])
        assert [len(computed.outputs["start_logits"]) for computed in await innocent] == [1, 1]
        with pytest.raises(InternalError):
            await guilty


async def test_the_next_batch_is_handed_to_a_core_that_works_where_two_are_in_flight() -> None:
    async with held_scheduler(in_flight=2) as system:
        await system.occupy()
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


async def test_the_last_core_ends_the_scheduler_and_leaves_what_waits_to_others() -> None:
    made: list[System] = []
    callers = []

    async def lose_the_last_core() -> None:
        async with held_scheduler() as system:
            made.append(system)
            callers.append(await system.occupy())
            system.backend.lost.add(0)
            system.backend.let_run()
            await asyncio.wait(callers, timeout=5)

    with pytest.raises(CoresLost, match="no core is left for the model 'small'"):
        await lose_the_last_core()
    # Not answered: the process ends, and the gateway sends it elsewhere.
    assert not callers[0].done()
    callers[0].cancel()
    # Nor is who comes before the process is gone.
    late = made[0].submit([11])
    await queued()
    assert not late.done()
    late.cancel()
