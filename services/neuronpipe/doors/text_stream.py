"""The events of generated texts, for the doors that stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.gateway.inference import TextEvent

EventT = TypeVar("EventT")


async def begun(events: AsyncGenerator[EventT, None]) -> AsyncGenerator[EventT, None]:
    """Waits for a part or the result, and returns all events, which the caller closes. Raises an error that comes
    before.
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
    """Yields the events of several texts as they come, each with the place of its stream.

    The first error ends all of them, and is raised. No stream is more than one event ahead of the caller, so a caller
    who reads slowly gets joined parts here, too.
    """

    def next_of(place: int) -> "asyncio.Future[TextEvent | None]":
        return asyncio.ensure_future(_next(streams[place]))

    reading = {next_of(place): place for place in range(len(streams))}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=lambda one: reading[one]):
                place, event = reading.pop(future), future.result()
                if event is not None:
                    reading[next_of(place)] = place
                    yield place, event
    finally:
        for future in reading:
            future.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[TextEvent, None]) -> TextEvent | None:
    return await anext(stream, None)
