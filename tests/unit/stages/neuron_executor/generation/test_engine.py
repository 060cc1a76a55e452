"""Texts of the engine are those of their prompts alone, whatever else is in its steps."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded, Unavailable
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.names import Metrics
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.generation import engine
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules, ScoreChanges
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun, TokenScores
from tests.suite.loop_clock import LoopClock
from tests.suite.waiting import cancelled, happens
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded
from tests.unit.stages.neuron_executor.generation.written_decoder import (
    VOCABULARY,
    WrittenDecoder,
    greedy,
    joining,
    prompt_item,
    running_generator,
    scores_after,
    tokens_of,
)

_SPEC = model_spec("text_generation", max_tokens=64, vocabulary_size=VOCABULARY)
# Not in the text after [1, 2].
_UNUSED = next(token_id for token_id in range(VOCABULARY) if token_id not in (1, 2, *greedy([1, 2], 8)))

_generator = partial(running_generator, spec=_SPEC)

_item = partial(prompt_item, _SPEC)


def _telling(put: Callable[[NewTokens], None]) -> Any:
    """A sink that tells what is put into it."""
    return SimpleNamespace(put=put)


def _reason(prediction: Prediction) -> int:
    return int(prediction.outputs.arrays[0]["finish_reason"])


async def test_a_text_is_the_best_tokens_after_its_prompt() -> None:
    async with _generator(WrittenDecoder(16)) as generator:
        prediction = await generator.generate(_item([5, 6, 7]))
    assert tokens_of(prediction) == greedy([5, 6, 7], 8)
    assert _reason(prediction) == FinishReason.FINISH_REASON_LENGTH


async def test_sequences_that_join_and_leave_do_not_change_others() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    decoder = WrittenDecoder(24)
    async with _generator(decoder) as generator:

        async def ask(number: int) -> None:
            prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))]
            count = chance.randint(1, 20)
            found = await joining(chance, generator, number, _item(prompt, count))
            assert found in (None, greedy(prompt, count))

        await asyncio.gather(*(ask(number) for number in range(60)))
        await happens(lambda: not generator.planner.blocks.in_use)
    assert generator.planner.preemptions > 0, "the cache was never too small"
    assert max(map(len, decoder.steps)) <= 4


async def _together(generator: TextGenerator, *items: ExecuteItem, streams: Iterable[Any] = ()) -> list[Prediction]:
    """The texts of items that are all there before a step is planned, and whose tokens go into streams."""
    with generator._steps.lock:
        streamed = zip_longest(items, streams)
        tasks = [asyncio.create_task(generator.generate(item, stream)) for item, stream in streamed]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


async def test_a_long_prompt_is_computed_in_parts_beside_others() -> None:
    decoder, long = WrittenDecoder(32), [1] * 40
    async with _generator(decoder) as generator:
        texts = await _together(generator, _item([2, 3], 20), _item(long, 4), _item([4], 20))
    assert [tokens_of(one) for one in texts] == [greedy([2, 3], 20), greedy(long, 4), greedy([4], 20)]
    assert max(sum(len(run.token_ids) for run in step) for step in decoder.steps) <= 8
    parts = [step for step in decoder.steps if any(len(run.token_ids) > 1 for run in step)]
    assert all(len(step) >= 2 for step in parts[1:]), "a part of the prompt ran alone while others were answered"


class _HeldDecoder(WrittenDecoder):
    """Computes the first `free_steps` steps, and further steps while `may_compute` is set."""

    def __init__(self, blocks: int, free_steps: int = 0) -> None:
        super().__init__(blocks)
        self.free_steps = free_steps
        self.begun_steps = 0
        self.may_compute = threading.Event()
        self.may_compute.set()

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        self.begun_steps += 1
        if self.begun_steps > self.free_steps:
            assert self.may_compute.wait(10), "the test did not let the step go on"
        return super().compute(runs)


async def test_a_long_prompt_takes_smaller_parts_beside_others_than_alone() -> None:
    decoder, long = _HeldDecoder(64), [1] * 50
    async with _generator(decoder, step_tokens=64) as generator:
        generator.planner.pace.note_step(0, 1, 0.016)
        generator.planner.pace.note_step(64, 0, 0.064)  # so a step may have 16 tokens of a prompt
        generator.planner.pace.note_step = lambda *_: None  # type: ignore[method-assign]
        await generator.generate(_item(long, 1))
        alone = [len(run.token_ids) for step in decoder.steps for run in step]
        decoder.steps.clear()
        decoder.may_compute.clear()
        beside = asyncio.create_task(generator.generate(_item([2], 40)))
        await happens(lambda: bool(generator.planner.running))
        other = asyncio.create_task(generator.generate(_item([3] * 50, 1)))
        await asyncio.sleep(0)
        decoder.may_compute.set()
        assert tokens_of(await other) == greedy([3] * 50, 1)
        assert tokens_of(await beside) == greedy([2], 40)
    assert alone == [50]
    parts = [max(len(run.token_ids) for run in step) for step in decoder.steps if len(step) == 2]
    assert max(parts) <= 16
    assert sum(parts) >= 50


async def test_a_cancelled_text_gives_its_blocks_back_by_the_next_step() -> None:
    decoder = WrittenDecoder(32)
    begun = asyncio.Event()
    async with _generator(decoder) as generator:
        leaving = asyncio.create_task(generator.generate(_item([9] * 20, 40), _telling(lambda _: begun.set())))
        await begun.wait()
        await cancelled(leaving)
        steps = len(decoder.steps)
        await generator.generate(_item([1, 2], 1))
        assert generator.planner.blocks.in_use == 0
    later = decoder.steps[steps + 1 :]
    assert all(run.token_ids == [1, 2] for step in later for run in step)


async def test_prompts_that_begin_alike_share_blocks() -> None:
    decoder, begin = WrittenDecoder(32), [7, 7, 8, 8, 9, 9, 5, 5]
    async with _generator(decoder) as generator:
        first = await generator.generate(_item([*begin, 1, 2], 4))
        second = await generator.generate(_item([*begin, 3], 4))
        again = await generator.generate(_item(begin, 4))
    assert first.generation
    assert first.generation.cached_tokens == 0
    assert second.generation
    assert second.generation.cached_tokens == 8
    assert again.generation
    assert again.generation.cached_tokens == 4, "the last token is computed, as it is scored"
    assert tokens_of(second) == greedy([*begin, 3], 4)
    assert tokens_of(again) == greedy(begin, 4)


async def test_callers_of_other_scopes_share_no_blocks() -> None:
    begin = [7, 7, 8, 8, 9, 9, 5, 5]
    async with _generator(WrittenDecoder(32)) as generator:
        await generator.generate(_item([*begin, 1], 1, call=Call(caller=Caller(cache_scope="a"))))
        other = await generator.generate(_item([*begin, 1], 1, call=Call(caller=Caller(cache_scope="b"))))
    assert other.generation
    assert other.generation.cached_tokens == 0


async def test_tokens_are_reported_step_by_step() -> None:
    reported: list[int] = []
    async with _generator(WrittenDecoder(16)) as generator:
        prediction = await generator.generate(_item([3], 6), _telling(lambda new: reported.extend(new.token_ids)))
    assert reported == tokens_of(prediction)
    assert prediction.generation
    assert prediction.generation.steps == 6


async def test_a_search_tells_that_it_has_begun_and_then_holds_no_turn() -> None:
    reported: list[NewTokens] = []
    async with _generator(WrittenDecoder(16)) as generator:
        await generator.generate(_item([3], 6, num_beams=2), _telling(reported.append))
    assert [(one.is_waiting, len(one.token_ids)) for one in reported] == [(True, 0)]


async def test_tokens_that_cannot_be_passed_on_end_their_text_alone() -> None:
    def fail(new: NewTokens) -> None:
        raise ValueError("a fault that the test chose")

    async with _generator(WrittenDecoder(16)) as generator:
        beside = asyncio.create_task(generator.generate(_item([1], 8)))
        with pytest.raises(InternalError, match="could not be passed on"):
            await asyncio.wait_for(generator.generate(_item([2], 1), _telling(fail)), 5)
        assert tokens_of(await beside) == greedy([1], 8)


async def test_a_stop_token_ends_the_text_and_belongs_to_it() -> None:
    expected = greedy([3, 4], 5)
    async with _generator(WrittenDecoder(16)) as generator:
        prediction = await generator.generate(_item([3, 4], 8, stop_token_ids=[expected[2]]))
    assert tokens_of(prediction) == expected[: expected.index(expected[2]) + 1]
    assert _reason(prediction) == FinishReason.FINISH_REASON_END


async def test_the_same_seed_gives_the_same_text_alone_and_among_others() -> None:
    sampled: dict[str, Any] = {"do_sample": True, "seed": 11, "top_k": 8}
    async with _generator(WrittenDecoder(64)) as generator:
        alone = tokens_of(await generator.generate(_item([1, 2, 3], 12, **sampled)))
        among = await asyncio.gather(
            *(generator.generate(_item([number], 12, do_sample=True, seed=number, top_k=8)) for number in range(8)),
            generator.generate(_item([1, 2, 3], 12, **sampled)),
        )
        other = tokens_of(await generator.generate(_item([1, 2, 3], 12, **{**sampled, "seed": 12})))
    assert tokens_of(among[-1]) == alone
    assert other != alone


async def test_a_text_that_the_cache_could_not_hold_is_refused_alone() -> None:
    async with _generator(WrittenDecoder(4)) as generator:
        beside = asyncio.create_task(generator.generate(_item([1], 8)))
        with pytest.raises(InvalidInput, match=r"10 tokens of the prompt and 8 new ones.*holds 16"):
            await generator.generate(_item([1] * 10, 8))
        with pytest.raises(InvalidInput, match=r"^prompt: 16 tokens, .*holds 16; send less$"):
            await generator.generate(_item([1] * 16, 1))
        assert tokens_of(await beside) == greedy([1], 8)


async def test_a_full_queue_refuses_with_a_delay() -> None:
    async with _generator(WrittenDecoder(16), max_queue_sequences=2, max_batch_size=1) as generator:
        generator.planner.pace.note_text(20.0)
        with generator._steps.lock:
            waiting = [asyncio.create_task(generator.generate(_item([1], 8))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 prompts wait for 'small', the limit is 2") as refused:
                await generator.generate(_item([1], 8))
        # The two before it have the only place for 20 s each.
        assert refused.value.retry_after_s == pytest.approx(40)
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("meanwhile", ["texts come", "a caller leaves", "it is closed"])
async def test_the_event_loop_never_waits_for_a_thread_that_has_the_planner(meanwhile: str) -> None:
    has_it, may_go = threading.Event(), threading.Event()

    def plan() -> None:
        """As the steps' thread, which has a lower priority and may get no CPU."""
        with generator._steps.lock:
            has_it.set()
            may_go.wait(5)

    async with _generator(WrittenDecoder(16)) as generator:
        texts: list[asyncio.Task[Any]] = [asyncio.create_task(generator.generate(_item([1], 8)))]
        if meanwhile == "a caller leaves":
            await asyncio.sleep(0)
        planning = threading.Thread(target=plan)
        planning.start()
        has_it.wait()
        if meanwhile == "a caller leaves":
            texts.pop().cancel()
        elif meanwhile == "it is closed":
            texts.append(asyncio.create_task(generator.close()))
        began_s = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - began_s < 2
        may_go.set()
        outcomes = await asyncio.gather(*texts, return_exceptions=True)
        planning.join()
        if meanwhile == "texts come":
            assert isinstance(outcomes[0], Prediction)
            assert tokens_of(outcomes[0]) == greedy([1], 8)


async def test_prompts_that_would_wait_too_long_are_refused_with_a_delay() -> None:
    decoder = WrittenDecoder(32)
    async with _generator(decoder, max_prompt_wait_s=3, max_batch_size=1) as generator:
        generator.planner.pace.note_text(2.0)
        # The first has the only place; each of those that wait takes another two seconds.
        with generator._steps.lock:
            taken = [asyncio.create_task(generator.generate(_item([number], 8))) for number in range(2)]
            await asyncio.sleep(0)
            problem = "a prompt would wait 4 s for its first step, the limit is 3 s"
            with pytest.raises(Overloaded, match=problem) as refused:
                await generator.generate(_item([3], 8))
        assert refused.value.retry_after_s == pytest.approx(1)
        found = [tokens_of(text) for text in await asyncio.gather(*taken)]
        assert found == [greedy([number], 8) for number in range(2)]
        assert tokens_of(await generator.generate(_item([3], 8))) == greedy([3], 8)


async def test_a_prompt_whose_first_step_would_come_too_late_is_refused_at_once() -> None:
    decoder = WrittenDecoder(32)
    async with _generator(decoder, max_batch_size=1) as generator:
        generator.planner.pace.note_text(2.0)
        with generator._steps.lock:
            first = asyncio.create_task(generator.generate(_item([1], 8)))
            await asyncio.sleep(0)
            with pytest.raises(DeadlineExceeded, match="the first step would begin in 2 s, after the deadline"):
                await generator.generate(_item([2], 8, call=Call(deadline_s=time.monotonic() + 1)))
        assert tokens_of(await first) == greedy([1], 8)


async def test_interactive_prompts_go_before_bulk_ones() -> None:
    decoder, bulk = WrittenDecoder(16), Call(priority=Priority.PRIORITY_BULK)
    async with _generator(decoder, max_batch_size=1) as generator:
        await _together(generator, _item([1], 2, call=bulk), _item([2], 2, call=bulk), _item([3], 2))
    prompts = [run.token_ids[0] for step in decoder.steps for run in step if run.past == 0]
    assert prompts == [3, 1, 2]


async def test_a_deadline_ends_a_text_and_frees_its_blocks() -> None:
    async with _generator(WrittenDecoder(32)) as generator:
        with pytest.raises(DeadlineExceeded):
            await generator.generate(_item([1] * 8, 40, call=Call(deadline_s=time.monotonic())))
        assert generator.planner.blocks.in_use == 0


async def test_scores_that_are_not_finite_fail_one_text_alone() -> None:
    async with _generator(WrittenDecoder(32, nan_token_id=_UNUSED)) as generator:
        beside = asyncio.create_task(generator.generate(_item([1, 2], 8)))
        with pytest.raises(InternalError, match="not finite"):
            await generator.generate(_item([_UNUSED], 8))
        assert tokens_of(await beside) == greedy([1, 2], 8)


class _CopyingDecoder(WrittenDecoder):
    """Writes four tokens only, each by the two before it; every fifth one by all of them, and it may be a fifth token.
    So drafts are often right, and never for long, and no token in the blocks may be a wrong one.
    """

    def scores_after(self, token_ids: Sequence[int]) -> np.ndarray:
        is_fifth = len(token_ids) % 5 == 0
        scores = scores_after(token_ids if is_fifth else token_ids[-2:])
        scores[3 : 8 if is_fifth else 7] += 10
        return scores


_COPYING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"stop_token_ids": [7]},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "no_repeat_ngram_size": 5},
    "logprobs": {"top_logprobs": 3},
    "prompt's logprobs": {"top_logprobs": 2, "prompt_logprobs": True},
    "last token": {"forced_eos_token_id": 5, "min_new_tokens": 4},
}


async def _copied(
    options: dict[str, Any], **settings: Any
) -> tuple[list[tuple[dict[str, Any], list[tuple[int, object]]]], dict[str, float]]:
    """Texts of many prompts and lengths, with the tokens and log probabilities that were told, in a cache that is too
    small for them; and the sum of each counter.
    """
    told: list[list[tuple[int, object]]] = []

    def report(new: NewTokens, number: int) -> None:
        told[number].extend(zip_longest(new.token_ids, new.logprobs))

    items, streams = [], []
    for count in range(1, 25):
        for prompt in ([3, 4, 5, 3, 4], [6] * count, [5, 3, 6, 4, *range(count)]):
            items.append(_item(prompt, count, **options))
            streams.append(_telling(partial(report, number=len(told))))
            told.append([])
    telemetry = Recorded()
    settings |= {"telemetry": telemetry, "max_queue_sequences": 128}
    async with _generator(_CopyingDecoder(24), **settings) as generator:
        predictions = await _together(generator, *items, streams=streams)
        assert generator.planner.blocks.in_use == 0
        assert options or generator.planner.preemptions, "the cache was never too small"
    arrays = [{name: array.tolist() for name, array in one.outputs.arrays[0].items()} for one in predictions]
    metrics = Metrics.GENERATED, Metrics.DRAFT_TOKENS, Metrics.ACCEPTED_TOKENS
    return [*zip(arrays, told, strict=True)], {one.name: sum(telemetry.counts(one).values()) for one in metrics}


@pytest.mark.parametrize("options", _COPYING.values(), ids=_COPYING)
async def test_drafts_change_no_text(options: dict[str, Any]) -> None:
    expected, counts = await _copied(options)
    assert counts[Metrics.DRAFT_TOKENS.name] == 0
    texts, counts = await _copied(options, prompt_lookup_tokens=4)
    assert texts == expected
    assert all([token for token, _ in told] == arrays["token_ids"] for arrays, told in texts)
    generated, drafted, accepted = counts.values()
    assert 0 < accepted < drafted
    assert accepted < generated == sum(len(told) for _, told in texts)


class _CountingDecoder(WrittenDecoder):
    def scores_after(self, token_ids: Sequence[int]) -> np.ndarray:
        scores = np.zeros(VOCABULARY, np.float32)
        scores[(token_ids[-1] + 1) % 8] = 1
        return scores


@pytest.mark.parametrize("drafts", [0, 4])
async def test_tokens_before_errors_are_passed_on_in_a_draft_too(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rules: LogitRules, token_ids: Sequence[int], *_: Any) -> Any:
        if len(token_ids) == 19:
            raise InvalidInput("options.regex", "no token may follow")
        return None, None

    monkeypatch.setattr(LogitRules, "forced", refuse)
    told: list[int] = []
    async with _generator(_CountingDecoder(16), prompt_lookup_tokens=drafts) as generator:
        with pytest.raises(InvalidInput, match="no token may follow"):
            await generator.generate(
                _item([*range(8), *range(8)], 12, top_logprobs=1), _telling(lambda new: told.extend(new.token_ids))
            )
    assert told == [0, 1, 2]


async def test_a_text_that_ends_within_a_draft_ends_there() -> None:
    prompt = [*range(8), *range(8)]
    async with _generator(_CountingDecoder(16), prompt_lookup_tokens=4) as generator:
        by_token = await generator.generate(_item(prompt, 12, stop_token_ids=[4]))
        by_length = await generator.generate(_item(prompt, 4))
    assert (tokens_of(by_token), _reason(by_token)) == ([0, 1, 2, 3, 4], FinishReason.FINISH_REASON_END)
    assert (tokens_of(by_length), _reason(by_length)) == ([0, 1, 2, 3], FinishReason.FINISH_REASON_LENGTH)
    assert by_token.generation
    assert by_token.generation.steps == 3, "two for the prompt, one for a token and its draft"


async def test_without_the_scores_of_all_tokens_there_are_no_drafts_and_prompts_are_scored_token_by_token() -> None:
    class Last(_CopyingDecoder):
        scores_all = False

    decoders, texts = [_CopyingDecoder(16), Last(16)], []
    options: dict[str, Any] = {"top_logprobs": 2, "prompt_logprobs": True}
    for decoder in decoders:
        async with _generator(decoder, prompt_lookup_tokens=4) as generator:
            prediction = await generator.generate(_item([3, 4, 5] * 4, 12, **options))
            texts.append({name: array.tolist() for name, array in prediction.outputs.arrays[0].items()})
    assert texts[0] == texts[1]
    assert len(decoders[0].steps) < 2 + 11, "of the prompt, and of the tokens but the first"
    assert len(decoders[1].steps) == 12 + 11
    assert {(len(run.token_ids), run.scored) for step in decoders[1].steps for run in step} == {(1, 1)}


async def test_scores_of_prompts_and_drafts_are_few_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"top_logprobs": 2, "prompt_logprobs": True}
    expected, _ = await _copied(options, prompt_lookup_tokens=4)
    computed, most = _CopyingDecoder.compute, 0

    def compute(decoder: _CopyingDecoder, runs: Sequence[DecoderRun]) -> TokenScores:
        nonlocal most
        most = max(most, sum(run.scored - 1 for run in runs))
        return computed(decoder, runs)

    monkeypatch.setattr(_CopyingDecoder, "compute", compute)
    monkeypatch.setattr(_CopyingDecoder, "part_tokens", 2)
    monkeypatch.setattr(engine, "_SPARE_SCORES_BYTES", 3 * 4 * VOCABULARY)
    assert (await _copied(options, prompt_lookup_tokens=4))[0] == expected
    assert most == 3


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
async def test_a_token_that_cannot_be_chosen_fails_one_text_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    item = _item([3, 4], 8, repetition_penalty=1.5, **options)

    def fail(changes: ScoreChanges, token_ids: Sequence[int], *others: Any) -> Any:
        if [*token_ids[:2]] == [3, 4]:
            raise IndexError("a text that the test chose")
        return unbroken(changes, token_ids, *others)

    unbroken = ScoreChanges.apply
    monkeypatch.setattr(ScoreChanges, "apply", fail)
    async with _generator(WrittenDecoder(64)) as generator:
        beside = asyncio.create_task(generator.generate(_item([1, 2], 8)))
        with pytest.raises(InternalError, match="not chosen"):
            await generator.generate(item)
        assert tokens_of(await beside) == greedy([1, 2], 8)
        assert generator.planner.blocks.in_use == 0
    assert [record.message for record in caplog.records] == ["a token could not be chosen"]


async def test_a_step_that_fails_ends_its_texts_and_the_next_ones_are_right() -> None:
    async with _generator(WrittenDecoder(32, failing_token_id=_UNUSED)) as generator:
        with pytest.raises(InternalError, match="could not compute"):
            await generator.generate(_item([_UNUSED], 8))
        assert tokens_of(await generator.generate(_item([1, 2], 8))) == greedy([1, 2], 8)
        assert generator.planner.blocks.in_use == 0


class _HangingDecoder(WrittenDecoder):
    """Its second step does not end before the test does."""

    end = threading.Event()

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        if len(self.steps) == 1:
            self.end.wait()
        return super().compute(runs)


async def test_a_step_that_hangs_ends_all_texts_and_the_process() -> None:
    decoder, callers = _HangingDecoder(32), list[asyncio.Task[Prediction]]()

    async def hang() -> None:
        async with _generator(decoder, batch_limit_s=0.1, max_batch_size=1) as generator:
            callers.extend(asyncio.create_task(generator.generate(_item([number], 8))) for number in range(3))
            await asyncio.sleep(20)  # it is cancelled

    try:
        with pytest.raises(CoresLost, match="no core is left for the model 'small'"):
            await asyncio.wait_for(hang(), 10)
    finally:
        decoder.end.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 5)
    assert [type(one) for one in outcomes] == [Unavailable] * 3


async def test_a_step_may_take_ten_times_the_longest_before_it() -> None:
    class Slow(WrittenDecoder):
        def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
            time.sleep((0.2, 0.8, 0, 0)[len(self.steps)])
            return super().compute(runs)

    async with _generator(Slow(16), batch_limit_s=0.5) as generator:
        assert tokens_of(await generator.generate(_item([1, 2], 4))) == greedy([1, 2], 4)


async def test_a_standstill_of_the_process_is_no_time_of_a_step() -> None:
    decoder = _HeldDecoder(32, free_steps=1)
    decoder.may_compute.clear()
    async with _generator(decoder, batch_limit_s=0.2) as generator:
        running = asyncio.create_task(generator.generate(_item([1], 4)))
        await happens(lambda: decoder.begun_steps == 2)
        time.sleep(0.5)  # as if the process were stopped: the limit is over before the step can end
        await asyncio.sleep(0.05)
        decoder.may_compute.set()
        assert tokens_of(await running) == greedy([1], 4)


async def test_a_standstill_late_in_a_step_ends_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, decoder = LoopClock(monkeypatch), _HeldDecoder(32, free_steps=1)
    decoder.may_compute.clear()
    async with _generator(decoder, batch_limit_s=100) as generator:
        running = asyncio.create_task(generator.generate(_item([1], 4)))
        await happens(lambda: decoder.begun_steps == 2)
        await clock.run(105)  # the first look comes within 10 s
        await clock.jump(1000)
        decoder.may_compute.set()
        assert tokens_of(await running) == greedy([1], 4)


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    async with _generator(WrittenDecoder(8)) as generator:
        with pytest.raises(InvalidInput, match="the vocabulary has 64"):
            await generator.generate(_item([64], 1))


async def test_options_that_no_gateway_sends_are_refused_alone() -> None:
    async with _generator(WrittenDecoder(16)) as generator:
        item = _item([1], 4, do_sample=True)
        assert item.options
        item.options.temperature = 0
        with pytest.raises(InvalidInput, match="temperature"):
            await generator.generate(item)


async def test_a_generator_that_closes_ends_its_texts_and_then_waits_for_the_running_step() -> None:
    decoder = _HeldDecoder(32, free_steps=1)
    decoder.may_compute.clear()
    async with _generator(decoder) as generator:
        running = asyncio.create_task(generator.generate(_item([1], 60)))
        await happens(lambda: decoder.begun_steps == 2)
        closing = asyncio.create_task(generator.close())
        with pytest.raises(Unavailable, match="stopping"):
            await running
        assert not closing.done()
        decoder.may_compute.set()
        await closing
    assert len(decoder.steps) == 2


async def test_a_generator_that_closes_begins_no_step_while_it_waits_for_the_planner() -> None:
    decoder, has_it, may_go = _HeldDecoder(32), threading.Event(), threading.Event()
    decoder.may_compute.clear()

    def plan() -> None:
        with generator._steps.lock:
            has_it.set()
            may_go.wait(5)

    async with _generator(decoder) as generator:
        running = asyncio.create_task(generator.generate(_item([1], 60)))
        await happens(lambda: decoder.begun_steps == 1)
        planning = threading.Thread(target=plan)
        planning.start()
        has_it.wait()
        closing = asyncio.create_task(generator.close())
        await asyncio.sleep(0)
        may_go.set()
        decoder.may_compute.set()
        time.sleep(0.1)  # as if the event loop had no CPU
        with pytest.raises(Unavailable, match="stopping"):
            await running
        await closing
        planning.join()
    assert len(decoder.steps) == 1
