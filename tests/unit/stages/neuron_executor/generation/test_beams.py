"""A beam search finds the same text alone and among others, and its blocks are copied before two texts write to one.

That it finds the text of transformers is what tests/oracle compares.
"""

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import FinishReason, GenerationOptions, TokenSequence
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import ExecuteItem
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.tasks.text_options import check_all_options, complete_options
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import (
    VOCABULARY,
    WrittenDecoder,
    joining,
    prompt_item,
    running_generator,
    scores_after,
    tokens_of,
)

_SPEC = model_spec("text_generation", max_tokens=64, vocabulary_size=VOCABULARY)


def _generator(decoder: WrittenDecoder, max_sequences: int = 8) -> AbstractAsyncContextManager[TextGenerator]:
    return running_generator(decoder, _SPEC, max_batch_size=max_sequences)


def _item(prompt: list[int], max_new_tokens: int = 8, num_beams: int = 3, **options: Any) -> ExecuteItem:
    return prompt_item(_SPEC, prompt, max_new_tokens, num_beams=num_beams, **options)


def _score(prompt: list[int], text: list[int]) -> float:
    """The sum of the logarithms of the tokens' probabilities."""
    return float(sum(_log_probabilities([*prompt, *text[:place]])[token] for place, token in enumerate(text)))


def _log_probabilities(before: list[int]) -> np.ndarray:
    logits = scores_after(before).astype(np.float64)
    found: np.ndarray = logits - np.log(np.exp(logits).sum())
    return found


async def test_many_beams_find_the_best_of_all_texts() -> None:
    # Of two tokens, 16 texts side by side hold every best first token that may lead to the best text.
    async with _generator(WrittenDecoder(64), max_sequences=16) as generator:
        found = tokens_of(await generator.generate(_item([5, 6], 2, 16)))
    best = max(([one, two] for one in range(VOCABULARY) for two in range(VOCABULARY)), key=lambda t: _score([5, 6], t))
    assert found == best


async def test_a_search_returns_its_best_texts_in_order_with_their_scores_and_log_probabilities() -> None:
    async with _generator(WrittenDecoder(64), max_sequences=16) as generator:
        item = _item([5, 6], 2, 16, num_return_sequences=3, length_penalty=2.0, top_logprobs=2)
        outputs = (await generator.generate(item)).outputs.arrays
    every = ([one, two] for one in range(VOCABULARY) for two in range(VOCABULARY))
    best = sorted(every, key=lambda text: -_score([5, 6], text))[:3]
    assert [one["token_ids"].tolist() for one in outputs] == best
    assert [float(one["score"]) for one in outputs] == pytest.approx([_score([5, 6], text) / 2**2 for text in best])
    for one, text in zip(outputs, best, strict=True):
        rows = [_log_probabilities([5, 6]), _log_probabilities([5, 6, text[0]])]
        assert one["logprobs"].tolist() == pytest.approx([row[token] for row, token in zip(rows, text, strict=True)])
        assert one["top_ids"].tolist() == [np.argsort(-row)[:2].tolist() for row in rows]
        assert one["top_logprobs"] == pytest.approx(np.array([np.sort(row)[::-1][:2] for row in rows]))


async def test_a_search_in_which_no_token_may_follow_is_refused_alone() -> None:
    """A short vocabulary whose tokens must not come twice."""
    async with _generator(WrittenDecoder(64)) as generator:
        excluded = [TokenSequence(token_ids=[token]) for token in range(VOCABULARY)]
        with pytest.raises(InvalidInput, match="no token may follow the text after 0 tokens: all are excluded"):
            await generator.generate(_item([5], 4, 2, bad_words_ids=excluded))
        assert len(tokens_of(await generator.generate(_item([5], 4, 2)))) == 4


async def test_searches_that_join_and_leave_do_not_change_others() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 14))] for _ in range(24)]
    counts = [chance.randint(1, 14) for _ in prompts]

    def item(number: int) -> ExecuteItem:
        options = {"do_sample": True, "seed": 9} if number % 3 == 0 else {}
        return _item(prompts[number], counts[number], 1 + number % 4, **options)

    async with _generator(WrittenDecoder(200)) as generator:
        alone = [tokens_of(await generator.generate(item(number))) for number in range(len(prompts))]
    decoder = WrittenDecoder(36)
    async with _generator(decoder) as generator:
        among = (joining(chance, generator, number, item(number)) for number in range(len(prompts)))
        for expected, found in zip(alone, await asyncio.gather(*among), strict=True):
            assert found in (None, expected)
        while generator.planner.running or generator.planner.waiting:
            await asyncio.sleep(0)
        assert generator.planner.blocks.in_use == 0
    assert max(sum(len(run.token_ids) for run in step) for step in decoder.steps) <= 8


async def test_texts_of_a_search_share_the_blocks_of_their_prompt() -> None:
    decoder = WrittenDecoder(64)
    async with _generator(decoder) as generator:
        await generator.generate(_item([7] * 12, 3, 4))
    (*_, last) = decoder.steps
    assert len(last) == 4
    assert len({tuple(run.blocks[:3]) for run in last}) == 1
    assert len({run.blocks[3] for run in last}) == 4


async def test_a_search_wider_than_a_step_runs_alone() -> None:
    decoder = WrittenDecoder(64)
    async with _generator(decoder, max_sequences=2) as generator:
        texts = await asyncio.gather(*(generator.generate(_item([number], 4, 12)) for number in range(2)))
    assert all(len(tokens_of(one)) == 4 for one in texts)
    assert {len(step) for step in decoder.steps} == {1, 12}


async def test_a_search_that_the_cache_could_not_hold_is_refused_alone() -> None:
    async with _generator(WrittenDecoder(12)) as generator:
        with pytest.raises(InvalidInput, match="holds 48"):
            await generator.generate(_item([1] * 10, 8, 4))
        expected = FinishReason.FINISH_REASON_LENGTH
        assert int((await generator.generate(_item([1] * 10, 8, 2))).outputs.arrays[0]["finish_reason"]) == expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_beams": 0}, "options.num_beams: 0, must be 1 to 16"),
        ({"num_beams": 17}, "options.num_beams: 17, must be 1 to 16"),
        ({"length_penalty": float("nan")}, "options.length_penalty: nan, must be -10 to 10"),
        ({"length_penalty": -11.0}, "options.length_penalty: -11, must be -10 to 10"),
        ({"early_stopping": 9}, "options.early_stopping: 9 is not known"),
        ({"num_beams": 2, "stop_strings": ["a"]}, "options.stop_strings: cannot be combined with num_beams"),
        ({"num_beams": 2, "num_return_sequences": 3}, "options.num_return_sequences: 3, must be at most num_beams, 2"),
        (
            {"num_beams": 2, "num_return_sequences": 3, "do_sample": True},
            "must be at most num_beams, 2; with num_beams 1, each is drawn by itself",
        ),
        ({"num_return_sequences": 3}, "options.num_return_sequences: more than 1 text need do_sample or num_beams"),
        ({"num_beams": 2, "seed": 3}, "options.seed: has an effect only with do_sample"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_all_options(GenerationOptions(**options), _SPEC)
    assert problem in refused.value.message


def test_the_least_length_of_a_model_is_no_more_than_a_request_takes_at_most() -> None:
    model = model_spec("summarization", min_new_tokens=11, decoder_start_token_ids=(2,), max_text_tokens=20)
    assert complete_options(GenerationOptions(max_new_tokens=9), model, 3).min_new_tokens == 9


def test_only_who_stops_at_a_text_searches_no_beams_unasked() -> None:
    model = model_spec("summarization", num_beams=4, decoder_start_token_ids=(2,), max_text_tokens=20)
    assert complete_options(GenerationOptions(), model, 3).num_beams == 4
    assert complete_options(GenerationOptions(do_sample=True), model, 3).num_beams == 4
    assert complete_options(GenerationOptions(top_logprobs=3), model, 3).num_beams == 4
    assert complete_options(GenerationOptions(stop_strings=["a"]), model, 3).num_beams == 1
    check_all_options(GenerationOptions(num_return_sequences=4), model)
    with pytest.raises(InvalidInput, match="need do_sample or num_beams"):
        check_all_options(GenerationOptions(num_return_sequences=4, stop_strings=["a"]), model)


@pytest.mark.parametrize(
    ("given", "draws"),
    [({}, True), ({"num_beams": 1}, True), ({"num_beams": 4}, False), ({"num_beams": 4, "do_sample": True}, True)],
    ids=["nothing", "no search", "a search", "a search that draws"],
)
def test_who_asks_a_model_that_draws_for_a_search_alone_gets_the_best_text(given: dict[str, Any], draws: bool) -> None:
    model = model_spec("text_generation", max_tokens=64, vocabulary_size=VOCABULARY, do_sample=True)
    options = GenerationOptions(**given)
    check_all_options(options, model)
    assert complete_options(options, model, 3).do_sample is draws
