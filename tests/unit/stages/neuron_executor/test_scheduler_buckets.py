"""stages/neuron_executor/scheduler.py with buckets."""

import asyncio

import pytest

from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput
from neuronpipe.stages.neuron_executor.batching import Limits
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.held_backend import FAILING
from tests.unit.stages.neuron_executor.scheduling import FixedClock, KnownTime, held_scheduler, queued

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
    # Both: 32 s for two in 4x4, 20 s for one in 1x4. A token costs so much that empty rows are worse than batches of
    # their own.
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


async def test_a_flood_of_short_sequences_runs_in_a_longer_bucket_where_its_own_holds_one() -> None:
    # 1x4 takes 20 and 4x8 48: one at a time would be 80 for four of them.
    async with held_scheduler(buckets=("1x4", "4x8"), batch_time=KnownTime(**_TIME)) as system:
        await system.occupy()
        callers = [system.submit([number]) for number in range(1, 7)]
        await queued()
        system.backend.let_run()
        answers = await asyncio.gather(*callers)
        # Two are left: 40 one at a time.
        assert system.backend.batches[1:] == [[[1], [2], [3], [4]], [[5]], [[6]]]
        assert [(one.batch_size, one.bucket_tokens) for (one,) in answers] == [(4, 8)] * 4 + [(1, 4)] * 2


async def test_longer_sequences_take_rows_of_a_longer_bucket() -> None:
    async with held_scheduler(buckets=("1x4", "1x8", "4x8"), batch_time=KnownTime(**_TIME)) as system:
        await system.occupy()
        callers = [system.submit([1]), system.submit([2] * 8), system.submit([3] * 8), system.submit([4] * 8)]
        await queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1], [2] * 8, [3] * 8, [4] * 8]]


async def test_the_bucket_that_a_caller_is_told_of_is_the_one_that_ran() -> None:
    # Two of 4 tokens: 2x8 computes 16 tokens, 8x4 thirty-two.
    async with held_scheduler(buckets=("8x4", "2x8"), batch_time=KnownTime(**_TIME), is_held=False) as system:
        assert [one.bucket_tokens for one in await system.submit([1], [2])] == [8, 8]
        assert system.backend.computed_shapes == [(2, 8)]


@pytest.mark.parametrize("limits", [Limits(1, 1, 8), Limits(8, 1000, 8)], ids=["small limits", "large limits"])
async def test_what_cannot_wait_for_a_full_bucket_is_told_by_the_bucket_and_not_by_the_limits(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    clock = FixedClock.installed(monkeypatch)
    async with held_scheduler(buckets=("1x4", "4x4"), batch_time=KnownTime(**_TIME), limits=limits) as system:
        await system.occupy()
        # 1x4 takes 20 s, 4x4 thirty-two.
        late, urgent = system.submit([1], deadline_s=clock.now_s + 41), system.submit([2], deadline_s=clock.now_s + 55)
        others = system.submit([3], [4], [5])
        await queued()
        clock.now_s += 25
        system.backend.let_run()
        await asyncio.wait([late, urgent, others])
        assert isinstance(late.exception(), DeadlineExceeded)
        assert isinstance(urgent.exception(), DeadlineExceeded)  # 30 s are left
        assert system.backend.batches[1:] == [[[3], [4], [5]]]
