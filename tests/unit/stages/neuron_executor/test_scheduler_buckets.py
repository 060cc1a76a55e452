"""stages/neuron_executor/scheduler.py with buckets."""

from typing import Any

import pytest

from neuronpipe.core.errors import InternalError, InvalidInput
from neuronpipe.stages.neuron_executor.batching import Limits
from tests.suite.fixed_clock import FixedClock
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.held_backend import FAILING
from tests.unit.stages.neuron_executor.scheduling import (
    KnownTime,
    batches_of,
    call,
    held_scheduler,
    limits,
    occupied_scheduler,
    queued,
)

# A bucket of four takes as long as it computes, and as two buckets of one.
_BUCKETS = ("1x4", "4x4", "1x8", "4x8")
_TIME = {"overhead_s": 16.0, "token_s": 1.0}


_SHARED: dict[str, tuple[Any, ...]] = {
    "a batch has no more sequences than its bucket": (
        [call([number]) for number in range(1, 6)],
        [[[1], [2], [3], [4]], [[5]]],
        {},
    ),
    # 32 s for two in 4x4, 20 s for one in 1x4. A token costs so much that empty rows are worse than batches of
    # their own.
    "a large bucket is not used for few sequences": (
        [call([1]), call([2])],
        [[[1]], [[2]]],
        {"batch_time": KnownTime(overhead_s=1, token_s=1)},
    ),
    "shorter ones take rows that would stay empty, and longer ones do not join": (
        [call([1] * 8), call([2] * 8, [3] * 8), call([4], [5])],
        [[[1] * 8, [2] * 8, [3] * 8, [4]], [[5]]],
        {},
    ),
    "a short one does not wait in a long batch while its own comes first": (
        [call([1]), call([2] * 8)],
        [[[1]], [[2] * 8]],
        {},
    ),
    "limits of a batch do not apply to buckets": ([call([1], [2], [3])], [[[1], [2], [3]]], {"limits": limits(1, 1)}),
    "longer ones take rows of a longer bucket": (
        [call([1]), call([2] * 8), call([3] * 8), call([4] * 8)],
        [[[1], [2] * 8, [3] * 8, [4] * 8]],
        {"buckets": ("1x4", "1x8", "4x8")},
    ),
}


@pytest.mark.parametrize(("calls", "batches", "options"), _SHARED.values(), ids=_SHARED)
async def test_who_shares_a_bucket(calls: list[Any], batches: list[list[list[int]]], options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"buckets": _BUCKETS, "batch_time": KnownTime(**_TIME)} | options
    assert await batches_of(*calls, **given) == batches


async def test_idle_cores_share_what_waits_for_a_bucket() -> None:
    async with held_scheduler(cores=2, buckets=_BUCKETS, batch_time=KnownTime(**_TIME)) as system:
        await queued()
        system.submit([1], [2], [3], [4])
        assert await system.backend.begun() == [[1], [2]]
        assert await system.backend.begun() == [[3], [4]]


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
    async with occupied_scheduler(buckets=("1x4", "4x8"), batch_time=KnownTime(**_TIME)) as system:
        callers = [system.submit([number]) for number in range(1, 7)]
        answers = await system.finish(*callers)
        # Two are left: 40 one at a time.
        assert system.backend.batches[1:] == [[[1], [2], [3], [4]], [[5]], [[6]]]
        assert [(one.batch_size, one.bucket_tokens) for (one,) in answers] == [(4, 8)] * 4 + [(1, 4)] * 2


async def test_the_bucket_that_a_caller_is_told_of_is_the_one_that_ran() -> None:
    # Two of 4 tokens: 2x8 computes 16 tokens, 8x4 thirty-two.
    async with held_scheduler(buckets=("8x4", "2x8"), batch_time=KnownTime(**_TIME), is_held=False) as system:
        assert [one.bucket_tokens for one in await system.submit([1], [2])] == [8, 8]
        assert system.backend.computed_shapes == [(2, 8)]


@pytest.mark.parametrize("limits_", [limits(1, 1), limits()], ids=["small limits", "large limits"])
async def test_what_cannot_wait_for_a_full_bucket_is_told_by_the_bucket_and_not_by_the_limits(
    clock: FixedClock, limits_: Limits
) -> None:
    # 1x4 takes 20 s, 4x4 thirty-two. 30 s are left for the second.
    calls = call([1], deadline_s=clock.now_s + 41), call([2], deadline_s=clock.now_s + 55), call([3], [4], [5])
    options: dict[str, Any] = {"buckets": ("1x4", "4x4"), "batch_time": KnownTime(**_TIME), "limits": limits_}
    assert await batches_of(*calls, clock=clock, wait_s=25, fails=[0, 1], **options) == [[[3], [4], [5]]]
