"""stages/neuron_executor/scheduler.py: who is computed with whom, who is not computed at all, and who learns what.

Most tests hold one sequence on the core, let others queue behind it, do something to them, and look at the batches that
follow. FakeBackend pads to one token more than asked for: a sequence of three tokens counts as four.
"""

import asyncio
import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    Unavailable,
)
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from tests.suite.fixed_clock import FixedClock
from tests.unit.stages.neuron_executor.held_backend import FAILING, NAN, HeldBackend
from tests.unit.stages.neuron_executor.scheduling import (
    LIMITS,
    SPEC,
    KnownTime,
    batches_of,
    call,
    held_scheduler,
    limits,
    occupied_scheduler,
    queued,
    running_model,
    sequence,
)


def _start_logits(*ids: int) -> list[object]:
    """FakeBackend's formula, by hand: the sine of id times position, positions counted from one.
    float32 has 7 digits."""
    return [pytest.approx(float(np.sin(token * position)), abs=1e-6) for position, token in enumerate(ids, 1)]


async def test_cancelled_request_leaves_its_batch_mates_alone() -> None:
    async with occupied_scheduler() as system:
        leaving, staying = system.submit([11, 12]), system.submit([21, 22, 23])
        await queued()
        leaving.cancel()
        system.backend.let_run()
        (computed,) = await staying
        assert computed.outputs["start_logits"].tolist() == _start_logits(21, 22, 23)


async def test_a_caller_who_leaves_while_its_batch_runs_leaves_its_batch_mates_alone() -> None:
    async with occupied_scheduler() as system:
        leaving, staying = system.submit([11, 12]), system.submit([21, 22, 23])
        await queued()
        system.backend.let_run(1)
        assert await system.backend.begun() == [[11, 12], [21, 22, 23]]
        leaving.cancel()
        [(computed,)] = await system.finish(staying)
        assert computed.outputs["start_logits"].tolist() == _start_logits(21, 22, 23)


async def test_the_core_lives_on_after_a_caller_left_during_its_batch() -> None:
    async with held_scheduler() as system:
        leaving = await system.occupy()
        leaving.cancel()
        system.backend.let_run()
        (computed,) = await system.submit([11])
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_a_cancelled_sequence_is_never_computed() -> None:
    async with occupied_scheduler() as system:
        leaving, staying = system.submit([11], [12]), system.submit([21])
        await queued()
        leaving.cancel()
        await system.finish(staying)
        assert system.backend.batches == [[[500]], [[21]]]


async def test_a_cancelled_sequence_leaves_the_queue_at_once_with_its_arrays() -> None:
    async with occupied_scheduler() as system:
        arrays = sequence(11, 12)
        kept = weakref.ref(arrays["input_ids"])
        leaving = asyncio.create_task(system.scheduler.run([arrays], Call()))
        staying = system.submit([21])
        await queued()
        assert system.scheduler.queued == (2, 5)
        leaving.cancel()
        await queued()
        del arrays, leaving  # a task keeps the frames that its exception passed
        gc.collect()
        assert system.scheduler.queued == (1, 2)
        assert kept() is None
        system.backend.let_run()
        await staying


async def test_the_sequences_of_an_input_that_failed_leave_the_queue_at_once() -> None:
    async with occupied_scheduler(limits=limits(max_batch_size=1)) as system:
        failing = system.submit([FAILING], [1], [2], [3], [4], [5], [6])
        await queued()
        system.backend.let_run(2)
        await asyncio.wait([failing])
        assert system.scheduler.queued == (0, 0)


async def test_a_sequence_before_its_deadline_is_computed(clock: FixedClock) -> None:
    async with held_scheduler(is_held=False) as system:
        (computed,) = await system.submit([11], deadline_s=clock.now_s + 0.001)
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


@pytest.mark.parametrize(
    ("cores", "waiting", "item", "needed_s"),
    # A sequence takes two seconds alone. What waits takes four seconds of one core.
    [
        pytest.param(1, [[1, 1, 1]], [[21]], 6, id="behind what waits"),
        pytest.param(2, [[1, 1, 1]], [[21]], 4, id="behind what the cores share"),
        pytest.param(1, [], [[1], [2], [3], [4]], 8, id="the sequences of an input count together"),
        pytest.param(2, [], [[1], [2], [3], [4]], 4, id="the cores share the sequences of an input"),
    ],
)
async def test_an_input_whose_deadline_would_pass_in_the_queue_is_refused_at_once(
    clock: FixedClock, cores: int, waiting: list[list[int]], item: list[list[int]], needed_s: float
) -> None:
    async with held_scheduler(cores=cores, batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        for _ in range(cores):
            await system.occupy()
        for one in waiting:
            system.submit(one)
        await queued()
        with pytest.raises(DeadlineExceeded, match="in the executor's queue"):
            await system.submit(*item, deadline_s=clock.now_s + needed_s)
        in_time = system.submit(*item, deadline_s=clock.now_s + needed_s + 0.1)
        await queued()
        assert system.backend.batches == [[[500]]] * cores
        system.backend.let_run()
        assert len(await in_time) == len(item)


async def test_an_estimate_that_refuses_all_is_tried_again_after_a_while(clock: FixedClock) -> None:
    batch_time = BatchTime()
    batch_time.anchor(2, 1000)  # a warm-up on a machine that stood still
    async with held_scheduler(is_held=False, batch_time=batch_time) as system:
        with pytest.raises(DeadlineExceeded):
            await system.submit([11], deadline_s=clock.now_s + 1)
        clock.now_s += 1
        (computed,) = await system.submit([11], deadline_s=clock.now_s + 1)
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_an_estimate_stays_good_while_a_batch_runs_however_long_it_takes(clock: FixedClock) -> None:
    async with occupied_scheduler(batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        clock.now_s += 3600
        with pytest.raises(DeadlineExceeded):
            await system.submit([11], deadline_s=clock.now_s + 2)


async def test_a_batch_that_will_be_alone_takes_as_long_as_lone_batches_do(clock: FixedClock) -> None:
    batch_time, lone_batch_time = KnownTime(overhead_s=0, token_s=10), KnownTime(overhead_s=0, token_s=1)
    async with held_scheduler(cores=2, batch_time=batch_time, lone_batch_time=lone_batch_time) as system:
        with pytest.raises(DeadlineExceeded):
            await system.submit([1], deadline_s=clock.now_s + 1.9)
        alone = system.submit([1], deadline_s=clock.now_s + 2.1)
        assert await system.backend.begun() == [[1]]
        with pytest.raises(DeadlineExceeded):  # beside another it would take twenty
            await system.submit([2], deadline_s=clock.now_s + 19)
        system.backend.let_run()
        await alone


async def test_lone_batches_and_others_are_timed_apart() -> None:
    batch_time, lone_batch_time = BatchTime(), BatchTime()
    async with held_scheduler(cores=2, batch_time=batch_time, lone_batch_time=lone_batch_time) as system:
        alone = await system.occupy()
        system.backend.let_run(1)
        await alone
        assert (batch_time.seconds(2) > 0, lone_batch_time.seconds(2) > 0) == (False, True)
        before = lone_batch_time.seconds(2)
        first, second = await system.occupy(), system.submit([2])
        await system.backend.begun()
        system.backend.let_run()
        await asyncio.gather(first, second)
        assert batch_time.seconds(2) > 0
        assert lone_batch_time.seconds(2) != before  # of the first, which began alone


async def test_nobody_is_refused_for_the_sake_of_those_who_left(clock: FixedClock) -> None:
    async with occupied_scheduler(batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        leaving = system.submit([1, 1, 1], [2, 2, 2])
        await queued()
        leaving.cancel()
        await queued()
        staying = system.submit([21], deadline_s=clock.now_s + 3)
        await system.finish(staying)


_BEGIN_S = FixedClock().now_s


# A sequence takes two seconds, two in one batch take four, three six.
_DEADLINES: dict[str, tuple[Any, ...]] = {
    "an expired one is never computed": ([call([11], deadline_s=_BEGIN_S + 1), call([21])], 1, [0], [[[21]]]),
    "nor one that has two seconds left": ([call([11], deadline_s=_BEGIN_S + 5), call([21])], 3, [0], [[[21]]]),
    "a batch does not grow beyond what its oldest can wait": (
        [call([11], deadline_s=_BEGIN_S + 5), call([21]), call([31])],
        *(0, [], [[[11], [21]], [[31]]]),
    ),
    "a batch does not grow beyond what one that joined can wait": (
        [call([11]), call([21], deadline_s=_BEGIN_S + 5), call([31])],
        *(0, [], [[[11], [21]], [[31]]]),
    ),
    # 1.5 seconds are left for the first; 4.5 for the second, which takes two alone and six with the others.
    "after one came too late, those that cannot wait for a full batch are dropped as well": (
        [call([11], deadline_s=_BEGIN_S + 5), call([21], deadline_s=_BEGIN_S + 8), call([31], [41])],
        *(3.5, [0, 1], [[[31], [41]]]),
    ),
    "one that is too late does not keep those behind it out of a batch": (
        [call([11], [12]), call([21], deadline_s=_BEGIN_S + 6.1), call([31])],
        *(5, [1], [[[11], [12], [31]]]),
    ),
}


@pytest.mark.parametrize(("calls", "wait_s", "fails", "batches"), _DEADLINES.values(), ids=_DEADLINES)
async def test_deadlines_decide_who_is_computed_with_whom(
    clock: FixedClock, calls: list[Any], wait_s: float, fails: list[int], batches: list[list[list[int]]]
) -> None:
    known = KnownTime(overhead_s=0, token_s=1)
    assert await batches_of(*calls, clock=clock, wait_s=wait_s, fails=fails, batch_time=known) == batches


async def test_a_second_after_one_came_too_late_urgent_sequences_are_computed_again(clock: FixedClock) -> None:
    async with occupied_scheduler(batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        late, other = system.submit([11], deadline_s=clock.now_s + 3), system.submit([12])
        await queued()
        clock.now_s += 3
        system.backend.let_run(1)
        assert await system.backend.begun() == [[12]]
        # Two sequences take four seconds, three six.
        callers = [system.submit([21], deadline_s=clock.now_s + 5.5), system.submit([31]), system.submit([41])]
        await queued()
        clock.now_s += 1
        system.backend.let_run()
        await asyncio.wait([late, other, *callers])
        assert system.backend.batches[2:] == [[[21], [31]], [[41]]]


async def test_a_sequence_that_a_growing_batch_would_make_late_is_not_failed_but_runs_later(clock: FixedClock) -> None:
    # Alone it takes 12 seconds, behind the nine tokens that wait 21; beside them, padded to nine, 10 + 18 = 28.
    calls, known = (call([1] * 8), call([21], deadline_s=clock.now_s + 25)), KnownTime(overhead_s=10, token_s=1)
    assert await batches_of(*calls, batch_time=known) == [[[1] * 8], [[21]]]


async def test_one_bad_sequence_fails_alone() -> None:
    async with occupied_scheduler() as system:
        good, bad, better = system.submit([11]), system.submit([FAILING, 21]), system.submit([31, 32])
        await queued()
        system.backend.let_run()
        outcomes = await asyncio.gather(good, bad, better, return_exceptions=True)
        assert isinstance(outcomes[1], InternalError)
        found = [one[0].outputs["start_logits"].tolist() for one in (await good, await better)]
        assert found == [_start_logits(11), _start_logits(31, 32)]


async def test_the_error_of_a_bad_sequence_says_nothing_of_the_back_ends() -> None:
    async with held_scheduler(is_held=False) as system:
        with pytest.raises(InternalError, match=r"^the model could not compute this input$"):
            await system.submit([FAILING])


async def test_a_bad_sequence_is_logged_with_what_the_back_end_raised(caplog: pytest.LogCaptureFixture) -> None:
    async with held_scheduler(is_held=False) as system:
        with caplog.at_level(logging.ERROR, logger="neuronpipe"), pytest.raises(InternalError):
            await system.submit([FAILING])
    (record,) = caplog.records
    assert "a token that the test chose" in caplog.text
    assert record.__dict__["fields"] == {"model": "small", "core": 0, "tokens": 1}


async def test_an_input_with_one_bad_sequence_fails_as_a_whole() -> None:
    async with held_scheduler(is_held=False) as system:
        with pytest.raises(InternalError):
            await system.submit([11], [FAILING])


async def test_the_other_sequences_of_an_input_that_failed_are_not_computed() -> None:
    async with occupied_scheduler(limits=limits(max_batch_size=1)) as system:
        failing = system.submit([FAILING], [21], [22])
        await queued()
        system.backend.let_run(2)
        await asyncio.wait([failing])
        system.backend.let_run()
        await system.submit([31])
        # The core takes the next one, 21, before the caller can hear of the failure.
        assert [[22]] not in system.backend.batches


async def test_a_sequence_given_up_while_a_failed_batch_is_run_again_is_not_computed() -> None:
    async with occupied_scheduler() as system:
        bad, leaving, staying = system.submit([FAILING]), system.submit([21]), system.submit([31])
        await queued()
        system.backend.let_run(2)
        assert await system.backend.begun() == [[FAILING], [21], [31]]
        assert await system.backend.begun() == [[FAILING]]  # the first by itself
        leaving.cancel()
        await queued()
        system.backend.let_run()
        await asyncio.wait([bad, staying])
        assert system.backend.batches[-1] == [[31]]
        assert [[21]] not in system.backend.batches


async def test_a_row_that_is_not_a_number_fails_alone_and_is_not_computed_again() -> None:
    async with occupied_scheduler() as system:
        good, bad = system.submit([11]), system.submit([NAN])
        await queued()
        system.backend.let_run()
        with pytest.raises(InternalError, match="is not finite"):
            await bad
        (computed,) = await good
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)
        assert system.backend.batches == [[[500]], [[11], [NAN]]]


class _BrokenBackend(HeldBackend):
    """Breaks the contract of Backend: raises what it likes, or returns too little."""

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        outputs = await super().compute(core, inputs, is_alone=is_alone)
        if (inputs["input_ids"] == 901).any():
            raise ZeroDivisionError
        if (inputs["input_ids"] == 902).any():
            del outputs["end_logits"]
        if (inputs["input_ids"] == 903).any():
            outputs["end_logits"] = outputs["end_logits"][:0]
        return outputs


@pytest.mark.parametrize("token", [901, 902, 903], ids=["any exception", "an output missing", "a row missing"])
async def test_a_back_end_that_breaks_its_contract_does_not_end_the_core(token: int) -> None:
    async with running_model(_BrokenBackend(SPEC, is_held=False), SPEC, LIMITS, BatchTime()) as scheduler:
        with pytest.raises(InternalError):
            await scheduler.run([sequence(token)], Call())
        (computed,) = await scheduler.run([sequence(11)], Call())
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_a_full_queue_refuses_at_once_and_names_the_limit() -> None:
    async with occupied_scheduler() as system:
        waiting = [system.submit([number]) for number in range(1, 9)]
        await queued()
        problem = r"^8 sequences wait for 'small', the limit is 8$"
        with pytest.raises(Overloaded, match=problem):
            await system.scheduler.run([sequence(21)], Call())
        assert not any(caller.done() for caller in waiting)


async def test_who_is_refused_is_told_to_wait_for_as_long_as_the_queue_takes() -> None:
    known = KnownTime(overhead_s=5, token_s=1)
    async with held_scheduler(cores=2, limits=limits(max_queue_sequences=2), batch_time=known) as system:
        for _ in range(2):
            await system.occupy()
        system.submit([1], [2, 2, 2])
        await queued()
        with pytest.raises(Overloaded) as caught:
            await system.submit([21])
        # Two and four tokens, on two cores.
        assert caught.value.retry_after_s == pytest.approx(3)


async def test_the_sequences_of_one_input_are_queued_together_or_not_at_all() -> None:
    async with occupied_scheduler() as system:
        waiting = [system.submit([number]) for number in range(1, 7)]
        await queued()
        with pytest.raises(Overloaded):
            await system.scheduler.run([sequence(21), sequence(22), sequence(23)], Call())
        system.backend.let_run()
        await asyncio.gather(*waiting)
        assert system.backend.batches == [[[500]], [[number] for number in range(1, 7)]]


async def test_the_last_places_of_the_queue_are_given_out() -> None:
    async with occupied_scheduler() as system:
        first, last = system.submit(*([number] for number in range(1, 7))), system.submit([7], [8])
        await queued()
        system.backend.let_run()
        assert [len(await first), len(await last)] == [6, 2]


async def test_an_input_of_more_sequences_than_the_queue_takes_is_refused_for_good() -> None:
    async with held_scheduler(is_held=False) as system:
        problem = r"^input: 9 sequences, the limit is 8; send less at once$"
        with pytest.raises(InvalidInput, match=problem):
            await system.submit(*([number] for number in range(1, 10)))


async def test_a_full_queue_of_abandoned_work_makes_room() -> None:
    async with occupied_scheduler() as system:
        leaving = [system.submit([number]) for number in range(1, 9)]
        await queued()
        for caller in leaving:
            caller.cancel()
        await queued()
        staying = system.submit([21])
        [(computed,)] = await system.finish(staying)
        assert computed.outputs["start_logits"].tolist() == _start_logits(21)


async def test_a_full_queue_of_expired_work_makes_room(clock: FixedClock) -> None:
    async with occupied_scheduler() as system:
        expired = [system.submit([number], deadline_s=clock.now_s + 1) for number in range(1, 9)]
        await queued()
        clock.now_s += 1
        staying = system.submit([21])
        await queued()
        system.backend.let_run()
        assert len(await staying) == 1
        assert {type(error) for error in await asyncio.gather(*expired, return_exceptions=True)} == {DeadlineExceeded}


async def test_an_idle_core_takes_a_sequence_at_once() -> None:
    async with held_scheduler() as system:
        system.submit([11])
        assert await system.backend.begun() == [[11]]


_COSTLY: dict[str, Any] = {"batch_time": KnownTime(overhead_s=51, token_s=1)}


_SHARED: dict[str, tuple[Any, ...]] = {
    "what waits runs together": ([call([11]), call([21], [22]), call([31])], [[[11], [21], [22], [31]]], {}),
    "the oldest goes first, of any length": (
        [call([11, 12]), call([21]), call([31, 32, 33])],
        [[[11, 12]], [[21]], [[31, 32, 33]]],
        {"limits": limits(max_batch_size=1)},
    ),
    "a batch prefers the length of its oldest": (
        [call([11]), call([21, 22]), call([31])],
        [[[11], [31]], [[21, 22]]],
        {"limits": limits(max_batch_size=2)},
    ),
    # Four tokens first; the others are four, one, three and two away from it.
    "a batch is filled with the nearest lengths first": (
        [call([1] * 4), call([2] * 8), call([3] * 3), call([4]), call([5] * 6)],
        [[[1] * 4, [3] * 3, [5] * 6], [[2] * 8, [4]]],
        {"limits": limits(max_batch_size=3)},
    ),
    # Three tokens of padding each: two of them cost 6, a third would make it 9 of 8.5, a sixth of the overhead.
    "shorter ones join while their padding costs far less than a batch of their own": (
        [call([1] * 9), call([2] * 6, [3] * 6, [4] * 6)],
        [[[1] * 9, [2] * 6, [3] * 6], [[4] * 6]],
        _COSTLY,
    ),
    # The two that are there would be padded by 4 tokens each, which makes 8 of 8.5; or by 5, which makes 10.
    "a longer one joins where padding the others costs far less than a batch of its own": (
        [call([1] * 3, [2] * 3), call([9] * 7)],
        [[[1] * 3, [2] * 3, [9] * 7]],
        _COSTLY,
    ),
    "a longer one does not join where padding the others costs more": (
        [call([1] * 3, [2] * 3), call([9] * 8)],
        [[[1] * 3, [2] * 3], [[9] * 8]],
        _COSTLY,
    ),
    # 4 x 11 = 44 padded tokens, of 11 + 3 x 2 = 17 of their own.
    "the only idle core takes all, with any padding": (
        [call([1] * 10), call([2], [3], [4])],
        [[[1] * 10, [2], [3], [4]]],
        {},
    ),
    "bulk waits while interactive work waits": (
        [call([11], is_bulk=True), call([21]), call([31])],
        [[[21]], [[31]], [[11]]],
        {"limits": limits(max_batch_size=1)},
    ),
    "a batch is of one priority": (
        [call([21]), call([11], is_bulk=True), call([31]), call([12], is_bulk=True)],
        [[[21], [31]], [[11], [12]]],
        {},
    ),
    "a batch has at most as many sequences as the limit": (
        [call([number]) for number in range(1, 6)],
        [[[1], [2]], [[3], [4]], [[5]]],
        {"limits": limits(max_batch_size=2)},
    ),
    # Two of 3 make 2 x 4 = 8, a third would make 12; 3 x 3 = 9 just fits.
    "a batch has at most as many padded tokens as the limit": (
        [call([1, 1, 1], [2, 2, 2], [3, 3], [4, 4], [5, 5])],
        [[[1, 1, 1], [2, 2, 2]], [[3, 3], [4, 4], [5, 5]]],
        {"limits": limits(max_batch_tokens=9)},
    ),
    # Two of 1 make 2 x 2; with one of 4 all three would be padded to 5, which makes 15.
    "a long one behind short ones counts with what it does to them": (
        [call([1], [2], [3, 3, 3, 3])],
        [[[1], [2]], [[3, 3, 3, 3]]],
        {"limits": limits(max_batch_tokens=12)},
    ),
    # One of 4 is padded to 5, and so is every other beside it: two make 10, three would make 15.
    "a short one behind a long one counts with what it is padded to": (
        [call([1, 1, 1, 1], [2], [3])],
        [[[1, 1, 1, 1], [2]], [[3]]],
        {"limits": limits(max_batch_tokens=10)},
    ),
}


@pytest.mark.parametrize(("calls", "batches", "options"), _SHARED.values(), ids=_SHARED)
async def test_who_is_computed_with_whom(
    calls: list[Any], batches: list[list[list[int]]], options: dict[str, Any]
) -> None:
    assert await batches_of(*calls, **options) == batches


async def test_sequences_given_up_cost_a_batch_no_padding() -> None:
    async with occupied_scheduler(**_COSTLY) as system:
        # Three tokens of padding each, as above, for those that are still wanted.
        oldest, leaving = system.submit([1] * 9), system.submit([2] * 6, [3] * 6)
        staying = system.submit([4] * 6, [5] * 6)
        await queued()
        leaving.cancel()
        await system.finish(oldest, staying)
        assert system.backend.batches[1:] == [[[1] * 9, [4] * 6, [5] * 6]]


async def test_a_batch_is_large_enough_once_its_overhead_is_a_small_share_of_its_time() -> None:
    # 4.2 tokens are 4 % of 105: eleven sequences of nine tokens are not enough, twelve are.
    calls, known = [call([number] * 8) for number in range(1, 16)], KnownTime(overhead_s=4.2, token_s=1)
    batches = await batches_of(*calls, limits=limits(32, 1000, 32), batch_time=known)
    assert [len(batch) for batch in batches] == [12, 3]


@pytest.mark.parametrize("busy", [0, 1])
async def test_cores_that_are_idle_share_what_waits(busy: int) -> None:
    async with held_scheduler(cores=2) as system:
        for _ in range(busy):
            await system.occupy()
        await queued()
        system.submit([1], [2], [3], [4])
        begun = [await system.backend.begun() for _ in range(2 - busy)]
        assert begun == ([[[1], [2], [3], [4]]] if busy else [[[1], [2]], [[3], [4]]])


async def test_bulk_delays_interactive_work_by_one_batch_at_most() -> None:
    async with held_scheduler(limits=limits(max_batch_size=2)) as system:
        bulk = system.submit([1], [2], [3], [4], [5], is_bulk=True)
        assert await system.backend.begun() == [[1], [2]]
        interactive = system.submit([21])
        await system.finish(bulk, interactive)
        assert system.backend.batches[1] == [[21]]


async def test_bulk_leaves_a_core_idle_while_interactive_work_comes(clock: FixedClock) -> None:
    async with held_scheduler(cores=2, limits=limits(max_batch_size=1)) as system:
        first = system.submit([21])
        assert await system.backend.begun() == [[21]]
        bulk = system.submit([1], [2], [3], is_bulk=True)
        await queued()
        second = system.submit([22])
        assert await system.backend.begun() == [[22]]
        system.backend.let_run(2)
        await asyncio.gather(first, second)
        assert await system.backend.begun() == [[1]]
        await queued()
        third = system.submit([23])
        assert await system.backend.begun() == [[23]]
        system.backend.let_run(2)
        await third
        assert await system.backend.begun() == [[2]]
        clock.now_s += 1
        system.backend.let_run()
        await bulk


async def test_all_cores_do_bulk_once_no_interactive_work_comes(clock: FixedClock) -> None:
    async with occupied_scheduler(cores=2, limits=limits(max_batch_size=1)) as system:
        bulk = system.submit([1], [2], [3], is_bulk=True)
        await queued()
        clock.now_s += 1
        system.backend.let_run(1)
        assert [await system.backend.begun(), await system.backend.begun()] == [[[1]], [[2]]]
        system.backend.let_run()
        await bulk


@pytest.mark.parametrize(("buckets", "token_s"), [((), 0.0006), (("1x1", "2x1", "4x1"), 0.001)])
async def test_bulk_batches_are_short_while_interactive_work_comes(
    clock: FixedClock, buckets: tuple[str, ...], token_s: float
) -> None:
    async with held_scheduler(batch_time=KnownTime(0.003, token_s), buckets=buckets) as system:
        interactive = system.submit([21])
        assert await system.backend.begun() == [[21]]
        bulk = system.submit([1], [2], [3], [4], [5], [6], is_bulk=True)
        await queued()
        system.backend.let_run(1)
        await interactive
        assert await system.backend.begun() == [[1], [2]]
        clock.now_s += 1
        system.backend.let_run()
        await bulk
        assert system.backend.batches[2:] == [[[3], [4], [5], [6]]]


async def test_interactive_work_is_not_refused_for_the_sake_of_bulk(clock: FixedClock) -> None:
    async with occupied_scheduler(batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        system.submit([1, 1, 1], is_bulk=True)
        await queued()
        interactive = system.submit([21], deadline_s=clock.now_s + 3)
        await system.finish(interactive)


async def test_bulk_is_refused_for_the_sake_of_interactive_work(clock: FixedClock) -> None:
    async with occupied_scheduler(batch_time=KnownTime(overhead_s=0, token_s=1)) as system:
        system.submit([1, 1, 1])
        await queued()
        with pytest.raises(DeadlineExceeded):
            await system.submit([21], deadline_s=clock.now_s + 3, is_bulk=True)


async def test_a_sequence_longer_than_the_batch_limit_runs_alone() -> None:
    async with held_scheduler(limits=limits(max_batch_tokens=4), is_held=False) as system:
        (computed,) = await system.submit([1, 2, 3, 4, 5])
        assert computed.outputs["start_logits"].tolist() == _start_logits(1, 2, 3, 4, 5)


async def test_outputs_go_to_the_callers_they_belong_to_whatever_the_lengths() -> None:
    seed = 20261121
    generator = np.random.default_rng(seed)
    inputs = [
        [generator.integers(1, 500, size=length).tolist() for length in generator.integers(1, 17, size=3)]
        for _ in range(40)
    ]
    async with held_scheduler(cores=2, limits=limits(5, 60, 200), is_held=False) as system:
        answers = await asyncio.gather(*(system.submit(*sequences) for sequences in inputs))
    for sequences, computed in zip(inputs, answers, strict=True):
        for ids, one in zip(sequences, computed, strict=True):
            assert one.outputs["start_logits"].tolist() == _start_logits(*ids), f"seed {seed}"


async def test_several_cores_run_at_once() -> None:
    async with held_scheduler(cores=3) as system:
        callers = []
        for number in range(1, 4):
            callers.append(system.submit([number]))
            assert await system.backend.begun() == [[number]]  # while the ones before are still held
        system.backend.let_run()
        await asyncio.gather(*callers)


async def test_a_core_runs_one_batch_at_a_time() -> None:
    async with occupied_scheduler() as system:
        waiting = system.submit([11])
        await asyncio.sleep(0.05)  # nothing happens
        assert system.backend.batches == [[[500]]]
        system.backend.let_run()
        await waiting


async def test_a_sequence_is_told_of_the_batch_that_it_ran_in(clock: FixedClock) -> None:
    async with occupied_scheduler() as system:
        caller = system.submit([1, 2, 3], [4])
        await queued()
        clock.now_s = 1001
        system.backend.let_run(1)
        await system.backend.begun()
        clock.now_s = 1003
        system.backend.let_run()
        for computed in await caller:
            # Three tokens, and the one more that FakeBackend asks for.
            assert (computed.batch_size, computed.bucket_tokens) == (2, 4)
            assert (computed.started_ns, computed.finished_ns) == (1001 * 10**9, 1003 * 10**9)


async def test_what_batches_take_is_learned_from_them(clock: FixedClock) -> None:
    batch_time = BatchTime()
    async with held_scheduler(batch_time=batch_time) as system:
        occupying = await system.occupy()
        clock.now_s += 2
        system.backend.let_run()
        await occupying
    # Nothing but this batch is known; the margin of error is on top.
    assert 2 <= batch_time.seconds(2) <= 4


@pytest.mark.parametrize(
    "bad", [[1000], [-1], list(range(1, 18)), []], ids=["outside", "negative", "too long", "empty"]
)
async def test_an_input_with_a_sequence_that_could_harm_a_batch_is_refused_before_it_is_queued(bad: list[int]) -> None:
    async with held_scheduler(is_held=False) as system:
        with pytest.raises(InvalidInput):
            await system.submit([11], bad)
        assert system.backend.batches == []


async def test_an_input_without_sequences_is_refused() -> None:
    async with held_scheduler(is_held=False) as system:
        with pytest.raises(InvalidInput, match=r"^sequences: "):
            await system.submit()


async def _outcome(caller: asyncio.Task[list[ComputedSequence]]) -> type[BaseException] | None:
    """What a caller got, who has five seconds to get anything at all."""
    try:
        await asyncio.wait_for(caller, 5)
    except (NeuronpipeError, TimeoutError) as error:
        return type(error)
    return None


async def test_closing_fails_what_waits_as_unavailable() -> None:
    async with occupied_scheduler() as system:
        waiting = [system.submit([11]), system.submit([21], [22])]
        await queued()
    assert [await _outcome(caller) for caller in waiting] == [Unavailable, Unavailable]
    assert system.backend.batches == [[[500]]]


async def test_closing_leaves_nobody_waiting_whose_batch_runs() -> None:
    async with held_scheduler() as system:
        running = await system.occupy()
    assert await _outcome(running) is Unavailable


async def test_closing_leaves_nobody_waiting_whose_failed_batch_is_run_again() -> None:
    async with occupied_scheduler() as system:
        callers = [system.submit([FAILING]), system.submit([21]), system.submit([31])]
        await queued()
        system.backend.let_run(2)
        assert await system.backend.begun() == [[FAILING], [21], [31]]
        assert await system.backend.begun() == [[FAILING]]
    assert [await _outcome(caller) for caller in callers] == [Unavailable] * 3


async def test_who_comes_after_closing_is_refused_as_unavailable() -> None:
    async with held_scheduler() as system:
        pass
    assert await _outcome(system.submit([11])) is Unavailable


async def test_closing_twice_in_a_row_is_the_same_as_once() -> None:
    async with held_scheduler() as system:
        system.scheduler.close()
