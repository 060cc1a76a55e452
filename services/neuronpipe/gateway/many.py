"""Runs many requests of one call: a batch with one response, or a stream of responses."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.requests import InferenceOutcome, InferenceRequest
from neuronpipe.platform.process.background import run_together

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


async def infer_batch(
    pipeline: Pipeline, call: Call, make_requests: Callable[[Call], Iterable[InferenceRequest]]
) -> list[InferenceOutcome]:
    """Runs many inputs concurrently; each succeeds or fails alone. `make_requests` gets the call that they share."""
    with pipeline.observe_together(call) as shared:
        outcomes = (_outcome(pipeline, request, Spans.REQUEST) for request in make_requests(shared))
        return await run_together(outcomes, partial(pipeline.wait_to_begin, shared))


async def infer_together(
    pipeline: Pipeline,
    call: Call,
    infer: Sequence[Callable[[Call], Coroutine[Any, Any, AnswerT]]],
    span: Name,
    *,
    at_once: int,
) -> list[AnswerT]:
    """Runs inputs side by side, `at_once` at most. All must succeed: the first error ends the rest, and is raised.
    `infer`: runs each input with the call that they share.
    """
    places = asyncio.Semaphore(at_once)

    async def run(infer_input: Callable[[Call], Coroutine[Any, Any, AnswerT]]) -> AnswerT:
        async with places:
            return await infer_input(shared)

    with pipeline.observe_together(call, span) as shared:
        return await run_together(map(run, infer))


async def infer_stream(
    pipeline: Pipeline, requests: AsyncIterable[InferenceRequest], max_in_flight: int
) -> AsyncIterator[tuple[str, InferenceOutcome]]:
    """Runs inputs as they arrive, `max_in_flight` at once. Yields ids and outcomes as they are ready."""

    async def answer(request: InferenceRequest) -> AsyncIterator[tuple[str, InferenceOutcome]]:
        await pipeline.wait_to_begin(request.call)
        if request.call.request_id:
            yield request.call.request_id, await _outcome(pipeline, request, Spans.INFER_STREAM)
        else:
            yield "", InvalidInput("request_id", "is required on a stream")

    async for ready in answer_stream(requests, answer, max_in_flight):
        yield ready


async def answer_stream(
    requests: AsyncIterable[RequestT], answer: Callable[[RequestT], AsyncIterator[AnswerT]], max_in_flight: int
) -> AsyncIterator[AnswerT]:
    """Answers requests as they arrive, `max_in_flight` at once, and yields answers as they are ready. `answer` yields
    the answers to a request. Raises the errors of `requests` and `answer`.
    """
    answers: asyncio.Queue[tuple[AnswerT, asyncio.Event] | Exception | None] = asyncio.Queue()
    free_places = asyncio.Semaphore(max_in_flight)
    running: set[asyncio.Task[None]] = set()

    async def put(request: RequestT) -> None:
        # A request keeps its place until the caller has taken the answer: a slow caller's answers cannot pile up.
        try:
            async for answered in answer(request):
                is_taken = asyncio.Event()
                answers.put_nowait((answered, is_taken))
                await is_taken.wait()
        except Exception as fault:
            answers.put_nowait(fault)
        finally:
            free_places.release()

    async def read() -> None:
        try:
            try:
                async for request in requests:
                    await free_places.acquire()
                    task = asyncio.create_task(put(request))
                    running.add(task)
                    task.add_done_callback(running.discard)
            finally:  # requests that were read before an error still get their answers
                while running:
                    await asyncio.wait(running)
            answers.put_nowait(None)
        except Exception as error:
            answers.put_nowait(error)

    reading = asyncio.create_task(read())
    try:
        while (ready := await answers.get()) is not None:
            if isinstance(ready, Exception):
                raise ready
            yield ready[0]
            ready[1].set()
    finally:
        tasks = reading, *running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ready = None  # an error's traceback keeps this frame


async def answer_in_order(
    requests: AsyncIterable[RequestT], answer: Callable[[RequestT], Awaitable[AnswerT]], max_in_flight: int
) -> AsyncGenerator[AnswerT, None]:
    """Answers requests as they arrive, `max_in_flight` at once, and yields the answers in the order of the requests.
    The first error of `requests` and `answer` ends the generator, and is raised.
    """
    running: asyncio.Queue[asyncio.Future[AnswerT] | None] = asyncio.Queue()
    free_places = asyncio.Semaphore(max_in_flight)

    async def read() -> None:
        async for request in requests:
            await free_places.acquire()
            running.put_nowait(asyncio.ensure_future(answer(request)))

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda task: running.put_nowait(None))
    try:
        while (answering := await running.get()) is not None:
            yield await answering
            free_places.release()  # the caller has taken the answer
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        unanswered = [answering for _ in range(running.qsize()) if (answering := running.get_nowait())]
        for answering in unanswered:
            answering.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)


async def _outcome(pipeline: Pipeline, request: InferenceRequest, span: Name) -> InferenceOutcome:
    try:
        return await pipeline.infer(request, span)
    except NeuronpipeError as error:
        return error
