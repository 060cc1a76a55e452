"""The main path: a request through tokenize, execute and postprocess to a response.

Knows stages only as functions, so the same code runs over the network and inside one process.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from functools import partial

from neuronpipe.api.v1.inference_pb2 import (
    CacheControl,
    InferBatchRequest,
    InferBatchResponse,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
    Priority,
    Usage,
)
from neuronpipe.api.v1.stages_pb2 import ExecuteItem, PostprocessItem, TokenizeItem
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.config import PipelineSettings
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, NeuronpipeError, WrongTask
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.core.stages import Call, Stages, internal_error
from neuronpipe.core.status import to_status
from neuronpipe.core.telemetry import Metrics, Name, Spans
from neuronpipe.gateway.admission import Gate, Place
from neuronpipe.gateway.record import Record, Records
from neuronpipe.gateway.results import ResultCache
from neuronpipe.tasks import TASKS

_MAX_REQUEST_ID_LENGTH = 256
# So the default limit of a million tokens in flight keeps images to 64 MiB of memory.
_IMAGE_BYTES_PER_TOKEN = 64
_PRIORITIES, _CACHE_CONTROLS = frozenset(Priority.values()), frozenset(CacheControl.values())


class Pipeline:
    """Runs requests for the models that it knows. Raises the errors of core/errors.py."""

    def __init__(
        self,
        models: ModelTable[ModelSpec],
        stages: Stages,
        settings: PipelineSettings,
        telemetry: Telemetry | None = None,
        results: ResultCache | None = None,
    ) -> None:
        self._models = models
        self._stages = stages
        self._results = results
        self._settings = settings
        self._gate = Gate(settings.max_requests_in_flight, settings.max_tokens_in_flight)
        telemetry = telemetry or Telemetry()
        self._records = Records(telemetry, models)
        telemetry.meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: self._gate.in_flight[0])
        telemetry.meters.gauge(Metrics.TOKENS_IN_FLIGHT, lambda: self._gate.in_flight[1])

    async def infer(self, request: InferRequest, call: Call, name: Name = Spans.INFER) -> InferResponse:
        """Runs one input through the three stages, unless its result is cached. `name` is its span's."""
        record = self._records.begin(name, call)
        try:
            response = await self._answer(request, call, record)
        except BaseException as error:
            record.fail(error)
            raise
        record.finish(response)
        return response

    async def _answer(self, request: InferRequest, call: Call, record: Record) -> InferResponse:
        request_id = request.request_id or secrets.token_hex(16)
        model, input_bytes = self._check(request)
        call = Call(call.deadline_s, call.traceparent, call.tracestate, request_id, request.priority)
        record.identify(model, call)
        compute = partial(self._compute, request, model, call, input_bytes, record)
        if self._results and self._results.keeps(model):
            return await self._results.get(request, model, call, compute)
        return await compute()

    async def _compute(self, request: InferRequest, model: ModelSpec, call: Call, input_bytes: int, record: Record) -> InferResponse:
        timer = asyncio.timeout(None if call.deadline_s is None else call.deadline_s - time.monotonic())
        # An image's tokens are known, and nearly nothing beside the bytes that it takes.
        known_tokens = model.image.tokens + input_bytes // _IMAGE_BYTES_PER_TOKEN if model.image else None
        with self._gate.admit(input_bytes, known_tokens, is_bulk=call.is_bulk, shed=partial(_expire, timer)) as place:
            try:
                async with timer:
                    return await self._run(request, model, call, place, record)
            except NeuronpipeError:
                raise
            except Exception as fault:
                if not isinstance(fault, TimeoutError) or not timer.expired():  # a stage's own TimeoutError is a fault
                    raise internal_error(fault, call.request_id, call.traceparent) from fault
                if place.is_shed:
                    raise self._gate.overloaded() from fault
                raise DeadlineExceeded("the deadline passed before the result was ready") from fault

    async def _run(self, request: InferRequest, model: ModelSpec, call: Call, place: Place, record: Record) -> InferResponse:
        version = str(model.version)

        encoded = await self._stages.tokenize(
            TokenizeItem(context=record.enter(Spans.PREPROCESS), model=model.name, version=version, input=request.input)
        )
        place.count(encoded.tokens)
        record.encoded(encoded)

        prediction = await self._stages.execute(
            ExecuteItem(context=record.enter(Spans.PREDICT), model=model.name, version=version, sequences=encoded.sequences)
        )
        record.predicted(prediction)

        result = await self._stages.postprocess(
            PostprocessItem(
                context=record.enter(Spans.POSTPROCESS),
                model=model.name,
                version=version,
                input=_options(request.input),
                annotations=encoded.annotations,
                outputs=prediction.outputs,
            )
        )
        record.leave()

        return InferResponse(
            model=model.name,
            version=version,
            request_id=call.request_id,
            result=result,
            usage=Usage(
                tokens=encoded.tokens,
                truncated_tokens=encoded.truncated_tokens,
                batch_size=prediction.batch_size,
                bucket_tokens=prediction.bucket_tokens,
                token_cache=encoded.token_cache,
                padded_tokens=prediction.padded_tokens,
            ),
        )

    async def infer_batch(self, request: InferBatchRequest, call: Call) -> InferBatchResponse:
        """Runs many inputs side by side; each succeeds or fails alone."""
        count, limit = len(request.requests), self._settings.max_batch_items
        if not 1 <= count <= limit:
            raise InvalidInput("requests", f"{count} requests, a batch takes 1 to {limit}")
        with self._records.together(call) as inner:
            outcomes = await asyncio.gather(*(self._outcome(one, inner, Spans.REQUEST) for one in request.requests))
        return InferBatchResponse(outcomes=_within(outcomes, self._settings.max_batch_response_bytes))

    async def infer_stream(self, requests: AsyncIterable[InferStreamRequest], call: Call) -> AsyncIterator[InferStreamResponse]:
        """Runs inputs as they arrive, a limited number at once, and yields answers as they are ready."""
        answers: asyncio.Queue[InferStreamResponse | None] = asyncio.Queue()
        free_places = asyncio.Semaphore(self._settings.max_stream_in_flight)

        async def answer(request: InferRequest) -> None:
            if request.request_id:
                outcome = await self._outcome(request, call, Spans.INFER_STREAM)
            else:
                outcome = InferOutcome(error=to_status(InvalidInput("request_id", "is required on a stream")))
            answers.put_nowait(InferStreamResponse(outcome=outcome, request_id=request.request_id))

        async def read() -> None:
            ended_by: NeuronpipeError | None = None
            async with asyncio.TaskGroup() as running:
                try:
                    async for message in requests:
                        await free_places.acquire()
                        running.create_task(answer(message.request))
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

    async def _outcome(self, request: InferRequest, call: Call, name: Name) -> InferOutcome:
        try:
            return InferOutcome(response=await self.infer(request, call, name))
        except NeuronpipeError as error:
            return InferOutcome(error=to_status(error))

    def _check(self, request: InferRequest) -> tuple[ModelSpec, int]:
        """The model of a request that can go on its way, known, of the right task, and the input's bytes, which are bearable."""
        if len(request.request_id) > _MAX_REQUEST_ID_LENGTH:
            raise InvalidInput("request_id", f"{len(request.request_id)} characters, the limit is {_MAX_REQUEST_ID_LENGTH}")
        if request.priority not in _PRIORITIES:
            raise InvalidInput("priority", f"{request.priority} is none of {', '.join(Priority.keys())}")
        if request.cache_control not in _CACHE_CONTROLS:
            raise InvalidInput("cache_control", f"{request.cache_control} is none of {', '.join(CacheControl.keys())}")
        if not request.model:
            raise InvalidInput("model", "is empty")
        model = self._models.find(request.model, request.version)
        task = request.input.WhichOneof("task")
        if task is None:
            raise InvalidInput("input", f"holds no task; model {model.name!r} takes {' or '.join(model.tasks)}")
        if task not in model.tasks:
            raise WrongTask(f"model {model.name!r} has the task {' or '.join(model.tasks)}, the input is for {task}")
        setting = "max_image_bytes" if model.image else "max_input_bytes"
        input_bytes, limit = request.input.ByteSize(), getattr(self._settings, setting)
        if input_bytes > limit:
            raise InvalidInput("input", f"{input_bytes} bytes, the limit is {limit} (the gateway's {setting})")
        return model, input_bytes


def _options(input: TaskInput) -> TaskInput:
    """What the post-process stage needs of an input."""
    task = TASKS[input.WhichOneof("task") or ""]
    return TaskInput(**{task.name: task.options(getattr(input, task.name))}) if task.options else input


def _within(outcomes: Iterable[InferOutcome], limit: int) -> Iterator[InferOutcome]:
    """The outcomes, with an error in the place of each that would make a response of more than `limit` bytes."""
    size_bytes = 0
    for outcome in outcomes:
        outcome_bytes = outcome.ByteSize()
        if size_bytes + outcome_bytes <= limit:
            size_bytes += outcome_bytes
            yield outcome
        else:
            problem = f"the results are too large for one response, the limit is {limit} bytes; send fewer at once, or over a stream"
            yield InferOutcome(error=to_status(InvalidInput("requests", problem)))


def _expire(timer: asyncio.Timeout) -> None:
    """Ends the timer's block now."""
    if not timer.expired():
        timer.reschedule(asyncio.get_running_loop().time())
