"""A generated text as it comes, for the doors that stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias, TypeVar

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.inference import GeneratedPart, InferenceRequest, InferenceResult
from neuronpipe.gateway.pipeline import Pipeline

Event: TypeAlias = GenerateStart | GeneratedPart | InferenceResult
EventT = TypeVar("EventT")


async def text_stream(
    pipeline: Pipeline, request: InferenceRequest, span: Name = Spans.GENERATE
) -> AsyncGenerator[Event, None]:
    """The start of a text, its parts, and the result of the request. Raises NeuronpipeError.

    To a caller who reads slowly, the parts that wait are one. A generator that is closed ends the request.
    """
    events: list[GenerateStart | GeneratedPart] = []
    has_news = asyncio.Event()

    def listen(event: GenerateStart | GeneratedPart) -> None:
        events.append(event)
        has_news.set()

    answering = asyncio.create_task(pipeline.infer(replace(request, listener=listen), span))
    answering.add_done_callback(lambda _: has_news.set())
    try:
        while events or not answering.done():
            await has_news.wait()
            has_news.clear()
            waiting, events[:] = events[:], []
            for event in _joined(waiting):
                yield event
        yield await answering
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def begun(events: AsyncGenerator[EventT, None]) -> AsyncGenerator[EventT, None]:
    """The same events, once there is a part, or the result. Raises what comes before it. The caller closes it."""
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


async def side_by_side(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several texts as they come, each with the place of its stream.

    The first error ends all of them, and is raised. No stream is more than one event ahead of the caller, so one who
    reads slowly gets joined parts here, too.
    """

    def next_of(place: int) -> "asyncio.Future[Event | None]":
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


async def _next(stream: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(stream, None)


def _joined(events: Iterable[GenerateStart | GeneratedPart]) -> Iterable[GenerateStart | GeneratedPart]:
    """The start by itself, and all parts of a text together."""
    parts: dict[int, list[GeneratedPart]] = {}
    for event in events:
        if isinstance(event, GenerateStart):
            yield event
        else:
            parts.setdefault(event.sequence, []).append(event)
    for sequence, several in parts.items():
        token_ids = [token_id for one in several for token_id in one.token_ids]
        logprobs = [logprob for one in several for logprob in one.logprobs]
        yield GeneratedPart("".join(one.text for one in several), token_ids, sequence, logprobs, several[-1].is_last)
