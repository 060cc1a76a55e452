"""Many requests of one call: a batch, whose answers come together, and a stream, whose answers come as they are ready."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.inference import InferenceOutcome, InferenceRequest
from neuronpipe.gateway.pipeline import Pipeline


async def infer_batch(
    pipeline: Pipeline, call: Call, make_requests: Callable[[Call], Sequence[InferenceRequest]]
) -> list[InferenceOutcome]:
    """Runs many inputs side by side; each succeeds or fails alone. `make_requests` makes them of the call that they share."""
    with pipeline.observe_together(call) as shared:
        return await asyncio.gather(*(_outcome(pipeline, request, Spans.REQUEST) for request in make_requests(shared)))


async def infer_stream(
    pipeline: Pipeline, requests: AsyncIterable[InferenceRequest], max_in_flight: int
) -> AsyncIterator[tuple[str, InferenceOutcome]]:
    """Runs inputs as they arrive, `max_in_flight` at once, and yields ids and answers as they are ready. Raises what `requests` raises."""
    answers: asyncio.Queue[tuple[str, InferenceOutcome] | None] = asyncio.Queue()
    free_places = asyncio.Semaphore(max_in_flight)

    async def answer(request: InferenceRequest) -> None:
        request_id = request.call.request_id
        if request_id:
            outcome = await _outcome(pipeline, request, Spans.INFER_STREAM)
        else:
            outcome = InvalidInput("request_id", "is required on a stream")
        answers.put_nowait((request_id, outcome))

    async def read() -> None:
        ended_by: NeuronpipeError | None = None
        async with asyncio.TaskGroup() as running:
            try:
                async for request in requests:
                    await free_places.acquire()
                    running.create_task(answer(request))
            except NeuronpipeError as error:  # what was read before still gets its answers
                ended_by = error
        if ended_by:
            raise ended_by

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda task: answers.put_nowait(None))
    try:
        while (ready := await answers.get()) is not None:
            # A place is free again once the caller took the answer, so that one who does not read cannot pile answers up here.
            yield ready
            free_places.release()
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _outcome(pipeline: Pipeline, request: InferenceRequest, span: Name) -> InferenceOutcome:
    try:
        return await pipeline.infer(request, span)
    except NeuronpipeError as error:
        return error
