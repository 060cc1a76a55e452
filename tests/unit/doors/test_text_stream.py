"""text_stream.side_by_side: several texts in one stream, of which none is left behind."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.text_stream import side_by_side
from neuronpipe.gateway.requests import GeneratedPart, TextEvent
from tests.suite.waiting import cancelled


class _Texts:
    """Two streams: one of one part, and one that goes on until it is closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def short(self) -> AsyncGenerator[TextEvent, None]:
        try:
            yield GenerateStart(model="writer", version="1", prompt_tokens=3)
            yield GeneratedPart("short", [1])
        finally:
            self.closed.append("short")

    async def endless(self) -> AsyncGenerator[TextEvent, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield GeneratedPart("endless", [2])
        finally:
            self.closed.append("endless")

    async def failing(self) -> AsyncGenerator[TextEvent, None]:
        yield GeneratedPart("before", [3])
        raise InvalidInput("prompt", "is wrong")


async def test_parts_have_the_place_of_their_stream_and_a_caller_that_leaves_closes_all() -> None:
    texts, seen = _Texts(), set()
    events = side_by_side([texts.endless(), texts.short(), texts.endless()])
    async for place, event in events:
        if isinstance(event, GenerateStart):
            assert place == 1
            continue
        assert isinstance(event, GeneratedPart)
        assert event.text == ("short" if place == 1 else "endless")
        seen.add(place)
        if seen == {0, 1, 2}:
            break
    await events.aclose()
    assert sorted(texts.closed) == ["endless", "endless", "short"]


async def test_the_first_error_ends_the_others() -> None:
    texts = _Texts()
    with pytest.raises(InvalidInput, match="is wrong"):
        async for _ in side_by_side([texts.endless(), texts.failing()]):
            pass
    assert texts.closed == ["endless"]


async def test_a_caller_that_is_cancelled_closes_a_stream_that_waits() -> None:
    closed = asyncio.Event()

    async def waits() -> AsyncGenerator[TextEvent, None]:
        try:
            await asyncio.Event().wait()
            yield GeneratedPart("", [])
        finally:
            closed.set()

    async def read() -> None:
        async for _ in side_by_side([waits()]):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancelled(reading)
    assert closed.is_set()


async def test_an_error_before_a_texts_first_event_comes_before_all_events() -> None:
    async def late(text: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        assert await anext(text)
        await asyncio.sleep(0.05)  # the other text has begun by then
        async for event in text:
            yield event

    texts = _Texts()
    with pytest.raises(InvalidInput, match="is wrong"):
        await anext(side_by_side([texts.endless(), late(texts.failing())]))
    assert texts.closed == ["endless"]
