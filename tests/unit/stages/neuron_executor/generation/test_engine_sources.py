"""Texts about sources are those of their sources alone, whatever else is in the steps of the engine."""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError, InvalidInput
from tests.suite.waiting import happens
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import (
    VOCABULARY,
    WrittenDecoder,
    greedy,
    joining,
    prompt_item,
    running_generator,
    tokens_of,
)

_START = (3,)
_SPEC = model_spec(
    "summarization", max_tokens=64, vocabulary_size=VOCABULARY, decoder_start_token_ids=_START, max_text_tokens=40
)

_generator = partial(running_generator, spec=_SPEC)

_item = partial(prompt_item, _SPEC)


async def test_a_text_is_about_its_source() -> None:
    decoder = WrittenDecoder(16)
    async with _generator(decoder) as generator:
        assert tokens_of(await generator.generate(_item([5, 6, 7]))) == greedy(_START, 8, [5, 6, 7])
    assert decoder.read_sources == [[5, 6, 7]]


async def test_texts_that_join_and_leave_do_not_change_others() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with _generator(WrittenDecoder(24)) as generator:

        async def ask(number: int) -> None:
            source = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40))]
            count = chance.randint(1, 20)
            found = await joining(chance, generator, number, _item(source, count))
            assert found in (None, greedy(_START, count, source))

        await asyncio.gather(*(ask(number) for number in range(60)))
        await happens(lambda: not generator.planner.blocks.in_use)
    assert generator.planner.preemptions > 0, "the cache was never too small"


async def test_texts_of_other_sources_share_no_blocks() -> None:
    async with _generator(WrittenDecoder(32)) as generator:
        # A text without an end of its own: its first tokens are the same for both sources.
        same: dict[str, Any] = {"forced_bos_token_id": 9}
        await generator.generate(_item([5, 6], 20, **same))
        other = await generator.generate(_item([6, 5], 20, **same))
    assert other.generation
    assert other.generation.cached_tokens == 0
    assert tokens_of(other) == [9, *greedy([*_START, 9], 19, [6, 5])]


class _UnreadableDecoder(WrittenDecoder):
    """Cannot read one source."""

    unreadable = (8, 9)

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        if tuple(token_ids) == self.unreadable:
            raise RuntimeError("a source that the test chose")
        super().read(token_ids, blocks)


async def test_a_source_that_cannot_be_read_fails_its_text_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with _generator(_UnreadableDecoder(32)) as generator:
        first = asyncio.create_task(generator.generate(_item([5, 6])))
        for _ in range(2):  # beside another text, and, at last, in a step of its own
            with pytest.raises(InternalError, match="could not compute"):
                await generator.generate(_item([*_UnreadableDecoder.unreadable]))
            assert tokens_of(await first) == greedy(_START, 8, [5, 6])
        assert generator.planner.blocks.in_use == 0
    assert [record.message for record in caplog.records] == ["a source could not be read"] * 2


async def test_a_source_that_the_cache_could_not_hold_beside_its_text_is_refused_alone() -> None:
    async with _generator(WrittenDecoder(8)) as generator:
        beside = asyncio.create_task(generator.generate(_item([1], 8)))
        with pytest.raises(InvalidInput, match=r"20 tokens of the text and 20 new ones.*holds 32"):
            await generator.generate(_item([1] * 20, 20))
        with pytest.raises(InvalidInput, match=r"^text: 32 tokens, .*holds 32; send less$"):
            await generator.generate(_item([1] * 32, 1))
        assert tokens_of(await beside) == greedy(_START, 8, [1])


async def test_a_step_reads_one_long_source_only() -> None:
    decoder = WrittenDecoder(64)
    sources = [[number] * 12 for number in range(3)]
    async with _generator(decoder) as generator:
        texts = await asyncio.gather(*(generator.generate(_item(source, 6)) for source in sources))
    assert [tokens_of(one) for one in texts] == [greedy(_START, 6, source) for source in sources]
    begins = [sum(run.past == 0 for run in step) for step in decoder.steps]
    assert max(begins) == 1


async def test_a_source_is_read_once_for_all_texts_of_a_scope() -> None:
    decoder, source = WrittenDecoder(32), [5, 6, 7, 8, 9, 10]
    calls = [Call(caller=Caller(cache_scope=scope)) for scope in ("a", "b", "b")]
    async with _generator(decoder) as generator:
        texts = [await generator.generate(_item(source, 8, call)) for call in calls]
        search = await generator.generate(_item(source, 8, calls[0], num_beams=2))
        assert generator.planner.blocks.in_use == 0
    assert [tokens_of(one) for one in texts] == [greedy(_START, 8, source)] * 3
    assert decoder.read_sources == [source, source], "once for each scope"
    assert [one.generation and one.generation.cached_tokens for one in (*texts, search)] == [0, 0, 6, 6]


async def test_a_source_of_which_a_block_was_taken_is_read_again() -> None:
    decoder, source = WrittenDecoder(8), [5, 6, 7, 8, 9, 10]
    async with _generator(decoder) as generator:
        await generator.generate(_item(source, 4))
        # Seven of eight blocks: at least one is of the source.
        await generator.generate(_item([4] * 12, 15))
        again = await generator.generate(_item(source, 4))
    assert decoder.read_sources == [source, [4] * 12, source]
    assert tokens_of(again) == greedy(_START, 4, source)
    assert again.generation
    assert again.generation.cached_tokens == 0
