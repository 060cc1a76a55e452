"""Tenants share the rows of steps and the blocks of the cache: no text waits for those of a tenant that has more."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.items import ExecuteItem, Work
from neuronpipe.platform.process.background import run_beside
from neuronpipe.stages.neuron_executor.generation import planner, tenant_shares
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence
from neuronpipe.stages.neuron_executor.generation.tenant_shares import TenantShares, split
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun, TokenScores
from tests.suite.waiting import happens
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import (
    VOCABULARY,
    WrittenDecoder,
    prompt_item,
    running_generator,
)

_SPEC = model_spec("text_generation", max_tokens=512, vocabulary_size=VOCABULARY)
_ROWS = 8
_Tokens = list[list[int]]


class _PacedDecoder(WrittenDecoder):
    """Its steps take so long that callers come between them on slow machines, too."""

    step_s = 0.0

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        time.sleep(self.step_s)
        return super().compute(runs)


@asynccontextmanager
async def _generator(
    blocks: int = 2000, step_s: float = 0.0, **settings: Any
) -> AsyncIterator[tuple[TextGenerator, WrittenDecoder]]:
    decoder = _PacedDecoder(blocks)
    decoder.step_s = step_s
    limits: dict[str, Any] = {"max_batch_size": _ROWS, "step_tokens": 16} | settings
    async with running_generator(decoder, _SPEC, **limits) as generator:
        yield generator, decoder


def _item(
    tenant: str,
    prompt: list[int],
    max_new_tokens: int,
    weight: float = 1.0,
    *,
    is_bulk: bool = False,
    remaining_s: float | None = None,
    **options: Any,
) -> ExecuteItem:
    call = Call(
        caller=Caller(tenant=tenant, cache_scope=tenant),
        priority=Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_UNSPECIFIED,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )
    return prompt_item(_SPEC, prompt, max_new_tokens, call, Work(weight=weight), **options)


async def _tokens(generator: TextGenerator, item: ExecuteItem) -> _Tokens:
    return [one["token_ids"].tolist() for one in (await generator.generate(item)).outputs.arrays]


async def _steps_before(generator: TextGenerator, decoder: WrittenDecoder, number: int, count: int = 3) -> int:
    """How many steps began after a short text of another tenant came, and before its own first step."""
    began, add = list[int](), generator.planner.add

    def added(sequence: GeneratedSequence) -> None:
        began.append(len(decoder.steps))
        add(sequence)

    prompt = [60, number]  # no other one begins so
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator.planner, "add", added)
        await _tokens(generator, _item("victim", prompt, count))
    own = (place for place, step in enumerate(decoder.steps) if any([*run.token_ids[:2]] == prompt for run in step))
    return next(own) - began[0]


_LARGE: dict[str, list[dict[str, Any]]] = {
    "beams": [{"num_beams": 4, "num_return_sequences": 4}] * 4,
    "samples": [{"do_sample": True, "seed": number} for number in range(16)],
    "one search": [{"num_beams": 8, "num_return_sequences": 2}] * 2,
    "drawn beams": [{"num_beams": 4, "do_sample": True, "seed": 3}] * 3,
}


def _large(form: str) -> Iterable[ExecuteItem]:
    return [_item("mallory", [7, number], 60, **options) for number, options in enumerate(_LARGE[form])]


@pytest.mark.parametrize("form", _LARGE)
async def test_a_short_text_begins_at_once_beside_large_ones_of_another_tenant_which_stay_as_they_are(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_shares, "_RECENT_S", 3600.0)  # or a slow machine would take the room between two texts
    async with _generator() as (generator, _):
        alone = [await _tokens(generator, item) for item in _large(form)]
    async with _generator() as (generator, decoder):
        large = [asyncio.create_task(_tokens(generator, item)) for item in _large(form)]
        await happens(lambda: len(decoder.steps) > 3)
        # One may have been planned when it came.
        assert max([await _steps_before(generator, decoder, number) for number in range(6)]) <= 1
        # A search that is larger than its share takes all rows again whenever nothing else runs.
        most = 6 if form == "one search" else 3
        assert generator.planner.preemptions <= most, "room was kept for the next text"
        assert await asyncio.gather(*large) == alone
        await happens(lambda: generator.planner.blocks.in_use == 0)


async def test_a_short_text_begins_at_once_where_another_tenant_has_all_blocks() -> None:
    async with _generator(blocks=64) as (generator, decoder):
        prompts = [[number] * 30 for number in range(8)]
        large = [asyncio.create_task(_tokens(generator, _item("mallory", one, 60))) for one in prompts]
        await happens(lambda: generator.planner.blocks.in_use > 55)
        assert max([await _steps_before(generator, decoder, number) for number in range(6)]) <= 1
        texts = await asyncio.gather(*large)
        assert generator.planner.preemptions
        for prompt, text in zip(prompts, texts, strict=True):
            assert await _tokens(generator, _item("mallory", prompt, 60)) == text


async def test_a_short_prompt_is_read_beside_long_ones_of_another_tenant() -> None:
    async with _generator(step_s=0.005) as (generator, decoder):  # the long ones take 200 steps
        large = [asyncio.create_task(_tokens(generator, _item("mallory", [one] * 400, 2))) for one in range(8)]
        await happens(lambda: len(decoder.steps) > 3)
        assert max([await _steps_before(generator, decoder, number, 1) for number in range(4)]) <= 1
        assert not all(one.done() for one in large), "it did not wait for these"
        await asyncio.gather(*large)


async def test_a_tenant_alone_has_all_rows_and_gives_only_those_beyond_its_share() -> None:
    async with _generator() as (generator, _):
        many = [asyncio.create_task(_tokens(generator, _item("a", [7, one], 100))) for one in range(12)]
        await happens(lambda: len(generator.planner.running) == _ROWS)
        others = [asyncio.create_task(_tokens(generator, _item("b", [8, one], 100))) for one in range(12)]
        await happens(lambda: sum(one.tenant == "b" for one in generator.planner.running) > 0)
        await asyncio.sleep(0.02)
        assert [one.tenant for one in generator.planner.running].count("a") == _ROWS // 2
        await asyncio.gather(*many, *others)


async def test_a_tenant_of_more_weight_has_more_rows() -> None:
    async with _generator() as (generator, decoder):
        texts = [
            asyncio.create_task(_tokens(generator, _item(tenant, [7, one], 100, weight=weight)))
            for one in range(12)
            for tenant, weight in (("a", 3.0), ("b", 1.0))
        ]
        await happens(lambda: len(decoder.steps) > 5)
        assert [one.tenant for one in generator.planner.running].count("a") == 6
        await asyncio.gather(*texts)


async def test_a_text_larger_than_its_share_ends_beside_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PATIENCE_S", 0.1)
    async with _generator() as (generator, _):
        large = _item("large", [7, 7], 100, num_beams=8)
        alone = await _tokens(generator, large)

        async def ask_again(tenant: str) -> None:
            number = 0
            while True:
                number += 1
                await _tokens(generator, _item(tenant, [8, number % 60], 10))

        async with run_beside(*(ask_again(f"{number}") for number in range(20))):
            await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                assert await _tokens(generator, large) == alone


async def test_a_full_queue_has_room_for_a_tenant_that_has_less_of_it() -> None:
    async with _generator(max_queue_sequences=8, max_batch_size=2) as (generator, _):
        generator.planner.pace.note_text(20.0)
        with generator._steps.lock:
            first = [asyncio.create_task(_tokens(generator, _item("mallory", [7, one], 60))) for one in range(8)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded):
                await _tokens(generator, _item("mallory", [7, 9], 60))
            victim = asyncio.create_task(_tokens(generator, _item("victim", [5], 3)))
            await asyncio.sleep(0.01)
        assert await victim
        found = await asyncio.gather(*first, return_exceptions=True)
        assert [isinstance(one, Overloaded) for one in found] == [False] * 7 + [True]
        assert isinstance(found[-1], Overloaded)
        # Seven sequences of its tenant wait before it. Two run side by side, for 20 s each.
        assert found[-1].retry_after_s == pytest.approx(60)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"remaining_s": 1.0}, DeadlineExceeded), ({"is_bulk": True}, Overloaded)],
    ids=["its deadline would pass", "it is bulk"],
)
async def test_no_text_makes_room_in_a_full_queue_for_one_that_is_refused_or_comes_later(
    options: dict[str, Any], error: type[Exception]
) -> None:
    async with _generator(max_queue_sequences=8, max_batch_size=2) as (generator, _):
        generator.planner.pace.note_text(20.0)
        with generator._steps.lock:
            first = [asyncio.create_task(_tokens(generator, _item("a", [7, one], 4))) for one in range(8)]
            await asyncio.sleep(0.01)
            with pytest.raises(error):
                async with asyncio.timeout(5):
                    await _tokens(generator, _item("b", [5], 3, num_beams=4, **options))
        assert len(await asyncio.gather(*first)) == 8


async def test_a_bulk_text_that_grows_takes_no_blocks_of_interactive_ones_of_another_tenant() -> None:
    async with _generator(blocks=32) as (generator, _):
        with generator._steps.lock:
            many = [asyncio.create_task(_tokens(generator, _item("a", [7, one], 30))) for one in range(3)]
            bulk = asyncio.create_task(_tokens(generator, _item("b", [8] * 12, 60, is_bulk=True)))
            await asyncio.sleep(0.01)
            interactive = [one for one in generator.planner if one.tenant == "a"]
        await asyncio.gather(*many, bulk)
        assert generator.planner.preemptions
        assert not any(one.record.preempted_ns for one in interactive)


async def test_a_forecast_is_that_of_the_tenants_own_texts() -> None:
    async with _generator(max_prompt_wait_s=1) as (generator, decoder):
        generator.planner.pace.note_text(20.0)
        large = [asyncio.create_task(_tokens(generator, _item("mallory", [7, one], 60))) for one in range(8)]
        await happens(lambda: len(decoder.steps) > 2)
        with pytest.raises(Overloaded, match="max_prompt_wait_s"):
            await _tokens(generator, _item("mallory", [7, 9], 60))
        assert await _tokens(generator, _item("victim", [5], 3))
        await asyncio.gather(*large)


def _text(tenant: str) -> Any:
    """A sequence, as far as its tenant's share looks at it."""
    return SimpleNamespace(tenant=tenant, weight=1.0, most_rows=1, blocks_held=1)


def test_what_a_tenant_had_of_its_share_is_kept_for_a_moment() -> None:
    now_s = 10.0
    shares = TenantShares((8, 100), lambda: now_s)
    shares.count([_text("a"), _text("a"), *(_text("b") for _ in range(6))], [])
    shares.count([_text("b")], [])
    assert shares.kept_for_others("b") == (2, 2)
    assert shares.kept_for_others("a") == (3, 5)  # up to its share of 4 rows, beside the one that it has
    now_s += 1.9
    shares.count([_text("b")], [])
    assert shares.kept_for_others("b") == (2, 2)
    now_s += 0.2
    shares.count([_text("b")], [])
    assert not shares.are_several
    assert shares.share_of("b", 1) == (8, 100)


def test_room_is_split_evenly_among_those_that_need_more_than_that() -> None:
    assert split(100, {"a": 500, "b": 10, "c": 40}) == {"b": 10, "c": 40, "a": 50}
    assert split(9, {"a": 50, "b": 50}) == {"a": 4, "b": 5}
    assert split(100, {"a": 7}) == {"a": 7}
    assert split(0, {"a": 7}) == {"a": 0}


async def test_a_prompt_larger_than_its_share_of_blocks_ends_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PATIENCE_S", 0.1)
    async with _generator(blocks=64) as (generator, _):
        large = _item("large", [7] * 180, 20)
        alone = await _tokens(generator, large)

        async def ask_again(tenant: str) -> None:
            number = 0
            while True:
                number += 1
                await _tokens(generator, _item(tenant, [8, number % 60] * 10, 20))

        async with run_beside(*(ask_again(f"{number}") for number in range(20))):
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                assert await _tokens(generator, large) == alone


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
async def test_two_texts_larger_than_their_shares_of_blocks_both_end(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "PATIENCE_S", 0.1)
    async with _generator(blocks=64) as (generator, _):
        tokens = 160 // options.get("num_beams", 1)
        texts = [_item(tenant, [number] * tokens, 8, **options) for number, tenant in ((7, "a"), (8, "b"))]
        alone = [await _tokens(generator, one) for one in texts]
        async with asyncio.timeout(10):
            assert await asyncio.gather(*(_tokens(generator, one) for one in texts)) == alone
