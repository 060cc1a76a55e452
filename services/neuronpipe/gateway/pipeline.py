"""The main path: a request through tokenize, execute and postprocess to its result.

Knows stages only as functions of values, so the same code runs over the network and inside one process, behind every door.
"""

import asyncio
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.calls import Call, told_error
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, NeuronpipeError, WrongTask
from neuronpipe.core.items import ExecuteItem, PostprocessItem, Stages, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics, Name, Spans
from neuronpipe.core.packed import Packed
from neuronpipe.gateway.admission import Admission, Gate
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult, Usage
from neuronpipe.gateway.models import GatewayModel, GatewayModels
from neuronpipe.gateway.request_observer import ObservedRequest, RequestObserver
from neuronpipe.gateway.results import ResultCache
from neuronpipe.gateway.settings import PipelineSettings

_MAX_REQUEST_ID_LENGTH = 256
# So the default limit of a million tokens in flight keeps images to 64 MiB of memory.
_IMAGE_BYTES_PER_TOKEN = 64
_PRIORITIES, _CACHE_CONTROLS = frozenset(Priority.values()), frozenset(CacheControl.values())


class Pipeline:
    """Runs requests for the models that it knows. Raises the errors of core/errors.py."""

    def __init__(
        self,
        models: GatewayModels,
        stages: Stages,
        settings: PipelineSettings,
        telemetry: Telemetry | None = None,
        results: ResultCache | None = None,
    ) -> None:
        """`results`: for models that have a digest, whose results are cached."""
        self._models = models
        self._stages = stages
        self._results = results
        self._settings = settings
        self._gate = Gate(settings.max_requests_in_flight, settings.max_tokens_in_flight)
        telemetry = telemetry or Telemetry()
        self._observer = RequestObserver(telemetry)
        telemetry.meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: self._gate.in_flight[0])
        telemetry.meters.gauge(Metrics.TOKENS_IN_FLIGHT, lambda: self._gate.in_flight[1])

    async def infer(self, request: InferenceRequest, span: Name = Spans.INFER) -> InferenceResult:
        """Runs one input through the three stages, unless its result is cached. `span`: the name of its span."""
        observed = self._observer.begin(span, request.call)
        try:
            served = self._find(request)
            with served as model:
                observed.identify(model.key, model.meters, model.spec.task)
                result, usage = await self._answer(request, model, observed)
        except BaseException as error:
            told = told_error(error, request.call) if isinstance(error, Exception) else error
            observed.fail(told)
            if told is error:
                raise
            raise told from error
        return InferenceResult(request.call.request_id, model.key, result, usage, observed.finish(usage.result_cache))

    def check_room(self, remaining_s: float | None) -> None:
        """What a door asks before it reads a request. Raises Overloaded where it would be read in vain; see Gate.check_room."""
        try:
            self._gate.check_room(remaining_s)
        except NeuronpipeError as error:
            self._observer.refused(error)
            raise

    def observe_together(self, call: Call, span: Name = Spans.INFER_BATCH) -> AbstractContextManager[Call]:
        """A call of many requests, as a span of its own. Yields the call of each of them, which are all sampled or none is."""
        return self._observer.together(call, span)

    async def _answer(self, request: InferenceRequest, model: GatewayModel, observed: ObservedRequest) -> tuple[Packed[TaskResult], Usage]:
        """The result, found or computed."""
        input_bytes = self._check(request, model)
        call = self._within_limit(request.call)
        compute = partial(self._compute, request, model, call, input_bytes, observed)
        if self._results and model.digest:
            timer = asyncio.timeout(call.remaining_s)  # another's work, which it may wait for, knows another deadline
            try:
                async with timer:
                    return await self._results.get(request, model.digest, compute)
            except TimeoutError as fault:
                if not timer.expired():
                    raise
                raise self._too_late(request, call) from fault
        return await compute()

    async def _compute(
        self, request: InferenceRequest, model: GatewayModel, call: Call, input_bytes: int, observed: ObservedRequest
    ) -> tuple[Packed[TaskResult], Usage]:
        """The result, computed within the request's deadline and its place among others."""
        timer = asyncio.timeout(call.remaining_s)
        # An image's tokens are known, and nearly nothing beside the bytes that it takes.
        known_tokens = model.spec.image.tokens + input_bytes // _IMAGE_BYTES_PER_TOKEN if model.spec.image else None
        with self._gate.admit(input_bytes, known_tokens, is_bulk=call.is_bulk, shed=partial(_expire, timer)) as admission:
            try:
                async with timer:
                    return await self._run(request, model, call, admission, observed)
            except TimeoutError as fault:
                if not timer.expired():  # a stage's own TimeoutError is a fault
                    raise
                if admission.is_shed:
                    raise self._gate.overloaded() from fault
                self._gate.shedding.note_late()
                raise self._too_late(request, call) from fault
            except DeadlineExceeded:
                self._gate.shedding.note_late()
                raise

    async def _run(
        self, request: InferenceRequest, model: GatewayModel, call: Call, admission: Admission, observed: ObservedRequest
    ) -> tuple[Packed[TaskResult], Usage]:
        """The three stages."""
        stage_call = call.for_stage(observed.enter(Spans.PREPROCESS), admission.tokens)
        stage_call.check_deadline()
        encoded = await self._stages.tokenize(TokenizeItem(stage_call, model.key, request.input))
        observed.encoded(encoded)
        self._check_tokens(encoded.tokens, len(encoded.sequences))
        admission.count(encoded.tokens)

        stage_call = stage_call.for_stage(observed.enter(Spans.PREDICT), encoded.tokens)
        stage_call.check_deadline()
        prediction = await self._stages.execute(ExecuteItem(stage_call, model.key, encoded.sequences))
        observed.predicted(prediction)

        stage_call = stage_call.for_stage(observed.enter(Spans.POSTPROCESS), encoded.tokens)
        stage_call.check_deadline()
        item = PostprocessItem(stage_call, model.key, request.input, encoded.annotations, prediction.outputs)
        result = await self._stages.postprocess(item)
        observed.leave()

        usage = Usage(
            tokens=encoded.tokens,
            truncated_tokens=encoded.truncated_tokens,
            batch_size=prediction.batch_size,
            bucket_tokens=prediction.bucket_tokens,
            token_cache=encoded.token_cache,
            padded_tokens=prediction.padded_tokens,
        )
        return result, usage

    def _find(self, request: InferenceRequest) -> ServedModel[GatewayModel]:
        """The model of a request whose words are in order."""
        request_id = request.call.request_id
        if len(request_id) > _MAX_REQUEST_ID_LENGTH:
            raise InvalidInput("request_id", f"{len(request_id)} characters, the limit is {_MAX_REQUEST_ID_LENGTH}")
        if request.call.priority not in _PRIORITIES:
            raise InvalidInput("priority", f"{request.call.priority} is none of {', '.join(Priority.keys())}")
        if request.cache_control not in _CACHE_CONTROLS:
            raise InvalidInput("cache_control", f"{request.cache_control} is none of {', '.join(CacheControl.keys())}")
        if not request.model:
            raise InvalidInput("model", "is empty")
        return self._models.table.find(request.model, request.version)

    def _check(self, request: InferenceRequest, model: GatewayModel) -> int:
        """Checks that the model takes the input. Returns the input's size in bytes."""
        spec, setting = model.spec, "max_image_bytes" if model.spec.image else "max_input_bytes"
        input_bytes, limit = request.input.size_bytes, getattr(self._settings, setting)
        if input_bytes > limit:
            raise InvalidInput("input", f"{input_bytes} bytes, the limit is {limit} (the gateway's {setting})")
        task = request.input.task
        if task is None:
            raise InvalidInput("input", f"holds no task; model {spec.name!r} takes {' or '.join(spec.tasks)}")
        if task not in spec.tasks:
            raise WrongTask(f"model {spec.name!r} has the task {' or '.join(spec.tasks)}, the input is for {task}")
        return input_bytes

    def _check_tokens(self, tokens: int, sequences: int) -> None:
        limit = self._settings.max_request_tokens
        if tokens > limit:
            raise InvalidInput(
                "input", f"{tokens} tokens in {sequences} sequences, the limit is {limit} (the gateway's max_request_tokens)"
            )

    def _within_limit(self, call: Call) -> Call:
        """The call with a deadline: a request that nobody ends would hold its place for ever."""
        latest_s = time.monotonic() + self._settings.max_request_s
        return call if call.deadline_s is not None and call.deadline_s <= latest_s else replace(call, deadline_s=latest_s)

    def _too_late(self, request: InferenceRequest, call: Call) -> DeadlineExceeded:
        # Not by the clock: an event loop's timers may be some milliseconds early.
        if call.deadline_s == request.call.deadline_s:
            return DeadlineExceeded("the deadline passed before the result was ready")
        return DeadlineExceeded(f"the result was not ready after {self._settings.max_request_s:g} s, the gateway's max_request_s")


def _expire(timer: asyncio.Timeout) -> None:
    """Ends the timer's block now."""
    if not timer.expired():
        timer.reschedule(asyncio.get_running_loop().time())
