"""neuron_executor/scheduler.py: who is computed with whom, who is not computed at all, and who learns what.

Most tests hold one sequence on the core, let others queue behind it, do something to them, and look at the batches that follow.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.scheduler import Computed, Limits, Scheduler, running_scheduler
from tests.unit.model_specs import model_spec
from tests.unit.neuron_executor.held_backend import FAILING, NAN, HeldBackend

_SPEC = model_spec("question_answering")
_LIMITS = Limits(max_batch_size=8, max_batch_tokens=1000, max_queue_sequences=8)


def _sequence(*ids: int) -> Arrays:
    return {"input_ids": np.array(ids, np.int32)}


def _start_logits(*ids: int) -> list[object]:
    """FakeBackend's formula, by hand: the sine of id times position, positions counted from one. float32 has 7 digits."""
    return [pytest.approx(float(np.sin(token * position)), abs=1e-6) for position, token in enumerate(ids, 1)]


@dataclass
class _System:
    scheduler: Scheduler
    backend: HeldBackend

    def submit(self, *sequences: Sequence[int], deadline_s: float | None = None) -> asyncio.Task[list[Computed]]:
        """One caller with the sequences of one input."""
        return asyncio.create_task(self.scheduler.run([_sequence(*ids) for ids in sequences], deadline_s))

    async def occupy(self) -> asyncio.Task[list[Computed]]:
        """A caller whose batch of its own holds the core until the test lets it run."""
        caller = self.submit([500])
        assert await self.backend.begun() == [[500]]
        return caller


@asynccontextmanager
async def _running(*, cores: int = 1, limits: Limits = _LIMITS, spec: ModelSpec = _SPEC, is_held: bool = True) -> AsyncIterator[_System]:
    backend = HeldBackend(spec, cores=cores, is_held=is_held)
    async with running_scheduler(backend, spec, limits) as scheduler:
        try:
            yield _System(scheduler, backend)
        finally:
            backend.let_run()  # closing waits for the batches that run


async def _queued(*callers: asyncio.Task[list[Computed]]) -> None:
    """Lets callers that were made just now reach the queue, or leave it."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_cancelled_request_leaves_its_batch_mates_alone() -> None:
    async with _running() as system:
        await system.occupy()
        leaving, staying = system.submit([11, 12]), system.submit([21, 22, 23])
        await _queued()
        leaving.cancel()
        system.backend.let_run()
        (computed,) = await staying
        assert computed.outputs["start_logits"].tolist() == _start_logits(21, 22, 23)


async def test_a_caller_who_leaves_while_its_batch_runs_leaves_its_batch_mates_alone() -> None:
    async with _running() as system:
        await system.occupy()
        leaving, staying = system.submit([11, 12]), system.submit([21, 22, 23])
        await _queued()
        system.backend.let_run(1)
        assert await system.backend.begun() == [[11, 12], [21, 22, 23]]
        leaving.cancel()
        await _queued()
        system.backend.let_run()
        (computed,) = await staying
        assert computed.outputs["start_logits"].tolist() == _start_logits(21, 22, 23)


async def test_the_core_lives_on_after_a_caller_left_during_its_batch() -> None:
    async with _running() as system:
        leaving = await system.occupy()
        leaving.cancel()
        system.backend.let_run()
        (computed,) = await system.submit([11])
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_a_cancelled_sequence_is_never_computed() -> None:
    async with _running() as system:
        await system.occupy()
        leaving, staying = system.submit([11], [12]), system.submit([21])
        await _queued()
        leaving.cancel()
        await _queued()
        system.backend.let_run()
        await staying
        assert system.backend.batches == [[[500]], [[21]]]


async def test_an_expired_sequence_is_never_computed() -> None:
    async with _running() as system:
        await system.occupy()
        expired, other = system.submit([11], deadline_s=time.monotonic()), system.submit([21])
        await _queued()
        system.backend.let_run()
        await asyncio.wait([expired, other])
        assert system.backend.batches == [[[500]], [[21]]]


async def test_an_expired_callers_error_is_its_deadline() -> None:
    async with _running() as system:
        await system.occupy()
        expired = system.submit([11], deadline_s=time.monotonic())
        await _queued()
        system.backend.let_run()
        with pytest.raises(DeadlineExceeded):
            await expired


async def test_a_sequence_before_its_deadline_is_computed() -> None:
    async with _running(is_held=False) as system:
        (computed,) = await system.submit([11], deadline_s=time.monotonic() + 3600)
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_one_bad_sequence_fails_alone() -> None:
    async with _running() as system:
        await system.occupy()
        good, bad, better = system.submit([11]), system.submit([FAILING, 21]), system.submit([31, 32])
        await _queued()
        system.backend.let_run()
        outcomes = await asyncio.gather(good, bad, better, return_exceptions=True)
        assert isinstance(outcomes[1], InternalError)
        assert [one[0].outputs["start_logits"].tolist() for one in (await good, await better)] == [_start_logits(11), _start_logits(31, 32)]


async def test_the_error_of_a_bad_sequence_says_nothing_of_the_back_ends() -> None:
    async with _running(is_held=False) as system:
        with pytest.raises(InternalError, match=r"^the model could not compute this input$"):
            await system.submit([FAILING])


async def test_a_bad_sequence_is_logged_with_what_the_back_end_raised(caplog: pytest.LogCaptureFixture) -> None:
    async with _running(is_held=False) as system:
        with caplog.at_level(logging.ERROR, logger="neuronpipe"), pytest.raises(InternalError):
            await system.submit([FAILING])
    (record,) = caplog.records
    assert "a token that the test chose" in caplog.text
    assert record.__dict__["fields"] == {"model": "small", "core": 0, "tokens": 1}


async def test_an_input_with_one_bad_sequence_fails_as_a_whole() -> None:
    async with _running(is_held=False) as system:
        with pytest.raises(InternalError):
            await system.submit([11], [FAILING])


async def test_the_other_sequences_of_an_input_that_failed_are_not_computed() -> None:
    async with _running(limits=Limits(max_batch_size=1, max_batch_tokens=1000, max_queue_sequences=8)) as system:
        await system.occupy()
        failing = system.submit([FAILING], [21], [22])
        await _queued()
        system.backend.let_run()
        await asyncio.wait([failing])
        await system.submit([31])
        # The core takes the next one, 21, before the caller can hear of the failure.
        assert [[22]] not in system.backend.batches


async def test_a_sequence_given_up_while_a_failed_batch_is_run_again_is_not_computed() -> None:
    async with _running() as system:
        await system.occupy()
        bad, leaving, staying = system.submit([FAILING]), system.submit([21]), system.submit([31])
        await _queued()
        system.backend.let_run(2)
        assert await system.backend.begun() == [[FAILING], [21], [31]]
        assert await system.backend.begun() == [[FAILING]]  # the first by itself
        leaving.cancel()
        await _queued()
        system.backend.let_run()
        await asyncio.wait([bad, staying])
        assert system.backend.batches[-1] == [[31]]
        assert [[21]] not in system.backend.batches


async def test_a_row_that_is_not_a_number_fails_alone_and_is_not_computed_again() -> None:
    async with _running() as system:
        await system.occupy()
        good, bad = system.submit([11]), system.submit([NAN])
        await _queued()
        system.backend.let_run()
        with pytest.raises(InternalError, match="is not finite"):
            await bad
        (computed,) = await good
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)
        assert system.backend.batches == [[[500]], [[11], [NAN]]]


class _BrokenBackend(HeldBackend):
    """Breaks the contract of Backend: raises what it likes, or returns too little."""

    def run(self, core: int, inputs: Arrays) -> dict[str, Array]:
        outputs = super().run(core, inputs)
        if (inputs["input_ids"] == 901).any():
            raise ZeroDivisionError
        if (inputs["input_ids"] == 902).any():
            del outputs["end_logits"]
        if (inputs["input_ids"] == 903).any():
            outputs["end_logits"] = outputs["end_logits"][:0]
        return outputs


@pytest.mark.parametrize("token", [901, 902, 903], ids=["any exception", "an output missing", "a row missing"])
async def test_a_back_end_that_breaks_its_contract_does_not_end_the_core(token: int) -> None:
    async with running_scheduler(_BrokenBackend(_SPEC, is_held=False), _SPEC, _LIMITS) as scheduler:
        with pytest.raises(InternalError):
            await scheduler.run([_sequence(token)], None)
        (computed,) = await scheduler.run([_sequence(11)], None)
        assert computed.outputs["start_logits"].tolist() == _start_logits(11)


async def test_a_full_queue_refuses_at_once_and_names_the_limit() -> None:
    async with _running() as system:
        await system.occupy()
        waiting = [system.submit([number]) for number in range(1, 9)]
        await _queued()
        with pytest.raises(Overloaded, match=r"^8 sequences wait for 'small', the limit is 8$"):
            await system.scheduler.run([_sequence(21)], None)
        assert not any(caller.done() for caller in waiting)


async def test_who_is_refused_is_told_to_wait_for_as_long_as_the_queue_takes() -> None:
    async with _running(limits=Limits(1, 1000, 2)) as system:
        first = await system.occupy()
        system.backend.let_run(1)
        await first
        occupying = system.submit([501])
        await system.backend.begun()
        waiting = [system.submit([number]) for number in (1, 2)]
        await _queued()
        with pytest.raises(Overloaded) as caught:
            await system.scheduler.run([_sequence(21)], None)
        assert caught.value.retry_after_s > 0
        system.backend.let_run()
        await asyncio.gather(occupying, *waiting)


async def test_the_sequences_of_one_input_are_queued_together_or_not_at_all() -> None:
    async with _running() as system:
        await system.occupy()
        waiting = [system.submit([number]) for number in range(1, 7)]
        await _queued()
        with pytest.raises(Overloaded):
            await system.scheduler.run([_sequence(21), _sequence(22), _sequence(23)], None)
        system.backend.let_run()
        await asyncio.gather(*waiting)
        assert system.backend.batches == [[[500]], [[number] for number in range(1, 7)]]


async def test_the_last_places_of_the_queue_are_given_out() -> None:
    async with _running() as system:
        await system.occupy()
        first, last = system.submit(*([number] for number in range(1, 7))), system.submit([7], [8])
        await _queued()
        system.backend.let_run()
        assert [len(await first), len(await last)] == [6, 2]


async def test_an_input_of_more_sequences_than_the_queue_takes_is_refused_for_good() -> None:
    async with _running(is_held=False) as system:
        with pytest.raises(InvalidInput, match=r"^input: 9 sequences, the executor's queue takes 8$"):
            await system.submit(*([number] for number in range(1, 10)))


async def test_a_full_queue_of_abandoned_work_makes_room() -> None:
    async with _running() as system:
        await system.occupy()
        leaving = [system.submit([number]) for number in range(1, 9)]
        await _queued()
        for caller in leaving:
            caller.cancel()
        await _queued()
        staying = system.submit([21])
        await _queued()
        system.backend.let_run()
        (computed,) = await staying
        assert computed.outputs["start_logits"].tolist() == _start_logits(21)


async def test_a_full_queue_of_expired_work_makes_room() -> None:
    async with _running() as system:
        await system.occupy()
        expired = [system.submit([number], deadline_s=time.monotonic()) for number in range(1, 9)]
        await _queued()
        staying = system.submit([21])
        await _queued()
        system.backend.let_run()
        assert len(await staying) == 1
        assert {type(error) for error in await asyncio.gather(*expired, return_exceptions=True)} == {DeadlineExceeded}


async def test_an_idle_core_takes_a_sequence_at_once() -> None:
    async with _running() as system:
        system.submit([11])
        assert await system.backend.begun() == [[11]]


async def test_what_waits_while_the_core_is_busy_runs_together_oldest_first() -> None:
    async with _running() as system:
        await system.occupy()
        callers = [system.submit([11]), system.submit([21, 22], [23]), system.submit([31])]
        await _queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[11], [21, 22], [23], [31]]]


async def test_a_batch_has_at_most_as_many_sequences_as_the_limit() -> None:
    async with _running(limits=Limits(max_batch_size=2, max_batch_tokens=1000, max_queue_sequences=8)) as system:
        await system.occupy()
        callers = [system.submit([number]) for number in range(1, 6)]
        await _queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1], [2]], [[3], [4]], [[5]]]


async def test_a_batch_has_at_most_as_many_padded_tokens_as_the_limit() -> None:
    async with _running(limits=Limits(max_batch_size=8, max_batch_tokens=9, max_queue_sequences=8)) as system:
        await system.occupy()
        # FakeBackend pads to one more than the longest: two of 3 make 2 x 4 = 8, a third would make 12; 3 x 3 = 9 just fits.
        callers = [system.submit([1, 1, 1], [2, 2, 2], [3, 3], [4, 4], [5, 5])]
        await _queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1, 1, 1], [2, 2, 2]], [[3, 3], [4, 4], [5, 5]]]


async def test_a_long_sequence_behind_short_ones_counts_with_what_it_does_to_them() -> None:
    async with _running(limits=Limits(max_batch_size=8, max_batch_tokens=12, max_queue_sequences=8)) as system:
        await system.occupy()
        # Two of 1 make 2 x 2; with one of 4 all three would be padded to 5, which makes 15.
        callers = [system.submit([1], [2], [3, 3, 3, 3])]
        await _queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1], [2]], [[3, 3, 3, 3]]]


async def test_a_short_sequence_behind_a_long_one_counts_with_what_it_is_padded_to() -> None:
    async with _running(limits=Limits(max_batch_size=8, max_batch_tokens=10, max_queue_sequences=8)) as system:
        await system.occupy()
        # One of 4 is padded to 5, and so is every other beside it: two make 10, three would make 15.
        callers = [system.submit([1, 1, 1, 1], [2], [3])]
        await _queued()
        system.backend.let_run()
        await asyncio.gather(*callers)
        assert system.backend.batches[1:] == [[[1, 1, 1, 1], [2]], [[3]]]


async def test_a_sequence_longer_than_the_batch_limit_runs_alone() -> None:
    async with _running(limits=Limits(max_batch_size=8, max_batch_tokens=4, max_queue_sequences=8), is_held=False) as system:
        (computed,) = await system.submit([1, 2, 3, 4, 5])
        assert computed.outputs["start_logits"].tolist() == _start_logits(1, 2, 3, 4, 5)


async def test_outputs_go_to_the_callers_they_belong_to_whatever_the_lengths() -> None:
    seed = 20261121
    generator = np.random.default_rng(seed)
    inputs = [[generator.integers(1, 500, size=length).tolist() for length in generator.integers(1, 17, size=3)] for _ in range(40)]
    limits = Limits(max_batch_size=5, max_batch_tokens=60, max_queue_sequences=200)
    async with _running(cores=2, limits=limits, is_held=False) as system:
        answers = await asyncio.gather(*(system.submit(*sequences) for sequences in inputs))
    for sequences, computed in zip(inputs, answers, strict=True):
        for ids, one in zip(sequences, computed, strict=True):
            assert one.outputs["start_logits"].tolist() == _start_logits(*ids), f"seed {seed}"


async def test_several_cores_run_at_once() -> None:
    async with _running(cores=3) as system:
        callers = []
        for number in range(1, 4):
            callers.append(system.submit([number]))
            assert await system.backend.begun() == [[number]]  # while the ones before are still held
        system.backend.let_run()
        await asyncio.gather(*callers)


async def test_a_core_runs_one_batch_at_a_time() -> None:
    async with _running() as system:
        await system.occupy()
        waiting = system.submit([11])
        await asyncio.sleep(0.05)  # nothing happens
        assert system.backend.batches == [[[500]]]
        system.backend.let_run()
        await waiting


async def test_a_sequence_is_told_of_the_batch_that_it_ran_in() -> None:
    async with _running() as system:
        await system.occupy()
        before_ns = time.monotonic_ns()
        caller = system.submit([1, 2, 3], [4])
        await _queued()
        system.backend.let_run()
        for computed in await caller:
            # Three tokens, and the one more that FakeBackend asks for.
            assert (computed.batch_size, computed.bucket_tokens) == (2, 4)
            assert before_ns <= computed.started_ns <= computed.finished_ns <= time.monotonic_ns()


@pytest.mark.parametrize("bad", [[1000], [-1], list(range(1, 18)), []], ids=["outside", "negative", "too long", "empty"])
async def test_an_input_with_a_sequence_that_could_harm_a_batch_is_refused_before_it_is_queued(bad: list[int]) -> None:
    async with _running(is_held=False) as system:
        with pytest.raises(InvalidInput):
            await system.submit([11], bad)
        assert system.backend.batches == []


async def test_an_input_without_sequences_is_refused() -> None:
    async with _running(is_held=False) as system:
        with pytest.raises(InvalidInput, match=r"^sequences: "):
            await system.submit()


async def _outcome(caller: asyncio.Task[list[Computed]]) -> type[BaseException] | None:
    """What a caller got, who has five seconds to get anything at all."""
    try:
        await asyncio.wait_for(caller, 5)
    except (NeuronpipeError, TimeoutError) as error:
        return type(error)
    return None


async def test_closing_fails_what_waits_as_unavailable() -> None:
    async with _running() as system:
        await system.occupy()
        waiting = [system.submit([11]), system.submit([21], [22])]
        await _queued()
    assert [await _outcome(caller) for caller in waiting] == [Unavailable, Unavailable]
    assert system.backend.batches == [[[500]]]


async def test_closing_leaves_nobody_waiting_whose_batch_runs() -> None:
    async with _running() as system:
        running = await system.occupy()
    assert await _outcome(running) is Unavailable


async def test_closing_leaves_nobody_waiting_whose_failed_batch_is_run_again() -> None:
    async with _running() as system:
        await system.occupy()
        callers = [system.submit([FAILING]), system.submit([21]), system.submit([31])]
        await _queued()
        system.backend.let_run(2)
        assert await system.backend.begun() == [[FAILING], [21], [31]]
        assert await system.backend.begun() == [[FAILING]]
    assert [await _outcome(caller) for caller in callers] == [Unavailable] * 3


async def test_who_comes_after_closing_is_refused_as_unavailable() -> None:
    async with _running() as system:
        pass
    assert await _outcome(system.submit([11])) is Unavailable


async def test_closing_waits_for_the_batches_that_run() -> None:
    backend = HeldBackend(_SPEC, is_held=False, device_time_s=0.05)
    async with running_scheduler(backend, _SPEC, _LIMITS) as scheduler:
        running = asyncio.create_task(scheduler.run([_sequence(11)], None))
        await backend.begun()
    assert backend.finished == 1
    await asyncio.wait([running])


async def test_closing_twice_in_a_row_is_the_same_as_once() -> None:
    async with _running() as system:
        await system.scheduler.close()


async def test_an_error_in_the_block_passes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with _running():
            raise ZeroDivisionError
