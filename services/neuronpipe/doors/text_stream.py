"""Reads the events of generated texts, for the doors that stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.gateway.requests import TextEvent

EventT = TypeVar("EventT")


async def begun(events: AsyncGenerator[EventT, None]) -> AsyncGenerator[EventT, None]:
    """Waits for the first part of a text, or its result, and returns all events, which the caller closes.

    Raises an error that comes before.
    """
    first: list[EventT] = []
    try:
        while not first or isinstance(first[-1][1] if isinstance(first[-1], tuple) else first[-1], GenerateStart):
            first.append(await anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _continued(first, events)


async def _continued(first: Iterable[EventT], events: AsyncGenerator[EventT, None]) -> AsyncGenerator[EventT, None]:
    async with aclosing(events):
        for event in first:
            yield event
        async for event in events:
            yield event


async def side_by_side(
    streams: Sequence[AsyncGenerator[TextEvent, None]],
) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Yields the events of several texts as they come, each with the index of its stream.

    The first error ends all streams, and is raised. The events begin when each stream has its first event, so that a
    wrong input is an error before any text. No stream is more than one event ahead of the caller, so a caller who reads
    slowly gets joined parts.
    """

    async def read(index: int) -> TextEvent | None:
        return await anext(streams[index], None)

    reading = {asyncio.create_task(read(index)): index for index in range(len(streams))}
    until = asyncio.FIRST_EXCEPTION  # at first, until an error or the first event of each stream
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=until)
            until = asyncio.FIRST_COMPLETED
            for index, event in [(reading.pop(task), task.result()) for task in sorted(done, key=reading.__getitem__)]:
                if event is not None:
                    reading[asyncio.create_task(read(index))] = index
                    yield index, event
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
