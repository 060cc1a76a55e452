"""The main path: a request through tokenize, execute and postprocess to its result.

Knows stages only as functions of values: the same code runs over the network and in one process, behind every door.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.background import Places
from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call, told_error
from neuronpipe.core.deadlines import Deadlines, Late, Timeout
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, WrongTask
from neuronpipe.core.items import NO_PREDICTION, ExecuteItem, PostprocessItem, Stages, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics, Name, Spans
from neuronpipe.core.packed import Packed
from neuronpipe.gateway.admission import Admission, Gate
from neuronpipe.gateway.generation import TextRuns
from neuronpipe.gateway.holding import Holding
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult, RawResult
from neuronpipe.gateway.request_checks import (
    check_fields,
    check_input,
    check_tokens,
    known_tokens,
    new_tokens,
    too_late,
    within_limit,
)
from neuronpipe.gateway.request_observer import ObservedRequest, RequestObserver
from neuronpipe.gateway.results import ResultCache
from neuronpipe.gateway.routing import GatewayModel, GatewayModels
from neuronpipe.gateway.settings import PipelineSettings, parse_limits
from neuronpipe.gateway.shadow import ShadowCopies
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.tasks import TASKS

# Requests of batches and streams that begin in a turn of the event loop, which thousands would hold up; and the turns
# that each of them takes where other tenants call, too.
_BEGINNINGS, _SHARED_TURNS = 4, 4


class Pipeline:
    """Runs requests for the models that it knows. Raises the errors of core/errors.py."""

    def __init__(
        self,
        models: GatewayModels,
        stages: Stages,
        settings: PipelineSettings,
        telemetry: Telemetry | None = None,
        results: ResultCache | None = None,
        tenants: Tenants | None = None,
        holding: Holding | None = None,
    ) -> None:
        """`results`: of models that have a digest. `tenants`: None where callers are anonymous. `holding`: that of the
        stages.
        """
        self._models = models
        self._stages = stages
        self._results = results
        self._holding = holding or Holding()
        self._settings = settings
        self._deadlines = Deadlines()
        self._beginnings = Places(_BEGINNINGS)
        limits = parse_limits(settings.model_concurrency)
        self.gate = Gate(settings.max_requests_in_flight, settings.max_tokens_in_flight, tenants, limits)
        telemetry = telemetry or Telemetry()
        self._observer = RequestObserver(telemetry)
        self.copies = ShadowCopies(self._run, self.gate, settings, self._observer, telemetry.meters)
        telemetry.meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: self.gate.in_flight[0])
        telemetry.meters.gauge(Metrics.TOKENS_IN_FLIGHT, lambda: self.gate.in_flight[1])
        telemetry.meters.gauge(Metrics.IN_FLIGHT_SHARE, lambda: self.gate.share)

    async def infer(self, request: InferenceRequest, span: Name = Spans.INFER) -> InferenceResult:
        """Runs one input through the three stages, unless its result is cached. `span`: the name of its span."""
        if self.gate.tenants:
            request = replace(request, call=self.gate.tenants.restrict(request.call))
        observed = self._observer.begin(span, request.call)
        try:
            served = self._find(request)
            with served as model:
                observed.identify(model.key, model.meters, model.spec.task)
                result, usage = await self._answer(request, model, observed)
        except BaseException as error:
            told = told_error(error, request.call) if isinstance(error, Exception) else error
            observed.fail(told)
            try:
                if told is error:
                    raise
                raise told from error
            finally:
                del told  # it keeps this frame
        answer = InferenceResult(request.call.request_id, model.key, result, usage, observed.finish(usage.result_cache))
        self.copies.offer(request, model, answer, self._models.table)
        return answer

    async def wait_for_turn(self, call: Call) -> None:
        """Returns when one more request of a call with many may begin; tenants take turns."""
        await self._beginnings.take(call.caller.tenant)
        self._beginnings.leave_after(_SHARED_TURNS if self.gate.tenants and self.gate.tenants.are_several else 1)

    def check_room(self, remaining_s: float | None) -> None:
        """Load shedding before a request is read; see Gate.check_room."""
        try:
            self.gate.check_room(remaining_s, current_caller().tenant)
        except NeuronpipeError as error:
            self._observer.refused(error)
            raise

    def observe_together(self, call: Call, span: Name = Spans.INFER_BATCH) -> AbstractContextManager[Call]:
        """A call of many requests, as a span of its own. Yields the call that each of them gets."""
        return self._observer.together(call, span)

    async def _answer(
        self, request: InferenceRequest, model: GatewayModel, observed: ObservedRequest
    ) -> tuple[Packed[TaskResult], Usage]:
        """The result, found or computed."""
        input_bytes = check_input(request, model.spec, self._settings)
        call = within_limit(request.call, self._settings)
        compute = partial(self._compute, request, model, call, input_bytes, observed)
        if self._results and model.digest and not (request.encoded or request.listener):
            try:  # another's work, which it may wait for, has its own deadline
                with Timeout(self._deadlines, call.deadline_s):
                    return await self._results.get(request, model.digest, compute)
            except Late as fault:
                raise too_late(request, call, self._settings) from fault
        return await compute()

    async def _compute(
        self, request: InferenceRequest, model: GatewayModel, call: Call, input_bytes: int, observed: ObservedRequest
    ) -> tuple[Packed[TaskResult], Usage]:
        """The result, computed within the request's deadline and its place among others."""
        held = observed.held = self._holding.watch()
        timer = Timeout(self._deadlines, call.deadline_s)
        with self.gate.admit(
            call,
            input_bytes,
            known_tokens(request, model.spec, input_bytes),
            model=model.key.name,
            new_tokens=new_tokens(request, model.spec),
            shed=timer.expire,
        ) as admission:
            try:
                with timer:
                    async with admission.turn(model.key) as own_call:
                        answer = await self._run(request, model, own_call, admission, observed)
                admission.held_s = held.total_ns / 1e9 if held else 0.0
                return answer
            except Late as fault:
                if admission.is_shed:
                    raise self.gate.shed_error(admission) from fault
                if held and held.service:
                    raise held.too_late(model.key) from fault
                admission.note_late()
                raise too_late(request, call, self._settings) from fault
            except DeadlineExceeded:
                admission.note_late()
                raise

    async def _run(
        self,
        request: InferenceRequest,
        model: GatewayModel,
        call: Call,
        admission: Admission,
        observed: ObservedRequest,
    ) -> tuple[Packed[TaskResult], Usage]:
        """The three stages."""
        stage_call = call.for_stage(observed.enter(Spans.PREPROCESS), admission.tokens)
        stage_call.check_deadline()
        encoded = request.encoded or await self._stages.tokenize(TokenizeItem(stage_call, model.key, request.input))
        observed.encoded(encoded)
        check_tokens(encoded, self._settings)

        text: TextRuns | None = None
        if encoded.sequences and TASKS[model.spec.task].generates:
            if request.encoded:
                raise WrongTask(f"model {model.spec.name!r} generates text; it takes no tensors")
            interval, count = self._settings.stream_interval, admission.generated
            text = TextRuns(self._stages, request, model, encoded, interval, count)
        admission.count(encoded.tokens, text.most_tokens if text else 0)

        stage_call = stage_call.for_stage(observed.enter(Spans.PREDICT), admission.tokens if text else encoded.tokens)
        stage_call.check_deadline()
        prediction = NO_PREDICTION  # the tokenizer alone has answered
        if text:
            prediction = await text.predict(stage_call)
        elif encoded.sequences:
            prediction = await self._stages.execute(ExecuteItem(stage_call, model.key, encoded.sequences))
        observed.predicted(prediction, text.first_token_ns if text else 0)

        stage_call = stage_call.for_stage(observed.enter(Spans.POSTPROCESS), encoded.tokens)
        stage_call.check_deadline()
        if text:
            result = await text.postprocess(stage_call)
        elif request.encoded:
            result = RawResult(prediction.outputs)
        else:
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
        if text and prediction.generation:
            usage.generated_tokens, usage.discarded_tokens = text.generated_tokens, text.discarded_tokens
            usage.cached_tokens, usage.steps = prediction.generation.cached_tokens, prediction.generation.steps
        return result, usage

    def _find(self, request: InferenceRequest) -> ServedModel[GatewayModel]:
        """The model of a request, whose other fields are checked first. Raises InvalidInput and ModelNotFound."""
        check_fields(request)
        table, tenants = self._models.table, self.gate.tenants
        table = tenants.table_of(request.call.caller, table) if tenants else table
        return table.find(request.model, request.version, request.call.route_key or request.call.request_id)
