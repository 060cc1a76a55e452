"""core/generated.py: the tokens of a text between the stage that generates them and the task that reads them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.core import generated
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, TokenLogprobs, TokenStream


def _step(token_id: int) -> NewTokens:
    return NewTokens([token_id], GenerationFigures(steps=token_id), [TokenLogprobs(-token_id)])


async def _read(events: AsyncIterator[NewTokens | str]) -> list[list[int] | str]:
    return [event if isinstance(event, str) else list(event.token_ids) async for event in events]


async def test_tokens_come_as_they_are_generated_and_then_the_value() -> None:
    stream = TokenStream()

    async def generate() -> str:
        for token_id in range(3):
            stream.put(_step(token_id))
            for _ in range(3):
                await asyncio.sleep(0)
        return "value"

    assert await _read(stream.read(generate())) == [[0], [1], [2], "value"]


async def test_a_reader_that_is_slow_gets_the_tokens_that_wait_together() -> None:
    stream = TokenStream()

    async def generate() -> str:
        for token_id in (1, 2):
            stream.put(_step(token_id))
        stream.put(NewTokens(is_waiting=True))
        return "value"

    async with aclosing(stream.read(generate())) as events:
        tokens = await anext(events)
        assert isinstance(tokens, NewTokens)
        assert (tokens.token_ids, tokens.figures.steps, tokens.is_waiting) == ([1, 2], 2, True)
        assert [logprob.logprob for logprob in tokens.logprobs] == [-1, -2]
        assert await _read(events) == ["value"]


async def test_a_reader_that_is_not_urgent_wakes_at_the_first_step_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_LATER_S", 60.0)
    stream = TokenStream(is_urgent=False)

    async def generate() -> str:
        for token_id in range(5):
            stream.put(_step(token_id))
            for _ in range(3):
                await asyncio.sleep(0)
        return "value"

    assert await _read(stream.read(generate())) == [[0], [1, 2, 3, 4], "value"]


async def test_the_tokens_before_an_error_come_before_it() -> None:
    stream = TokenStream()

    async def generate() -> str:
        stream.put(_step(1))
        raise Unavailable("the stage has gone")

    events = stream.read(generate())
    assert await anext(events) == _step(1)
    with pytest.raises(Unavailable, match="has gone"):
        await anext(events)


async def test_a_generator_that_is_closed_cancels_what_generates() -> None:
    stream, is_cancelled = TokenStream(), asyncio.Event()

    async def generate() -> str:
        stream.put(_step(1))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise
        return "never"

    events = stream.read(generate())
    await anext(events)
    await events.aclose()
    assert is_cancelled.is_set()
