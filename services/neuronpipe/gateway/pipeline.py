"""The pipeline behind every door: finds a request's model, looks for a known result, and has the main path run."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager

from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call, to_caller_error
from neuronpipe.core.deadlines import Deadlines, Timeout
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics, Name, Spans
from neuronpipe.gateway.admission import AdmissionControl
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.kinds import kind_of
from neuronpipe.gateway.request_checks import check_fields, with_long_texts, within_limit
from neuronpipe.gateway.request_observer import RequestObserver, RequestTimings
from neuronpipe.gateway.requests import InferenceRequest, InferenceResult, TextEvent, TextParts
from neuronpipe.gateway.results import ResultCache
from neuronpipe.gateway.routing import GatewayModel, GatewayModels
from neuronpipe.gateway.running import PipelineContext
from neuronpipe.gateway.settings import PipelineSettings, parse_limits
from neuronpipe.gateway.shadow import ShadowCopies
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.background import Places

# The number of requests of InferBatch and InferStream that begin in a turn of the event loop, which thousands would
# hold up.
_BEGINNINGS = 4
# The number of turns that each such request takes where other tenants also call.
_SHARED_TURNS = 4


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
        held_items: HeldItems | None = None,
    ) -> None:
        """`results`: the cache for models that have a digest. `tenants`: None where callers are anonymous."""
        self._models = models
        self._results = results
        self._held_items = held_items or HeldItems()
        self._beginnings = Places(_BEGINNINGS)
        telemetry = telemetry or Telemetry()
        control = self.admission_control = AdmissionControl(
            settings.max_requests_in_flight,
            settings.max_tokens_in_flight,
            tenants,
            parse_limits(settings.model_concurrency),
        )
        self._context = PipelineContext(stages, settings, control, Deadlines(), RequestObserver(telemetry))
        self.copies = ShadowCopies(self._context, telemetry.meters)
        telemetry.meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: control.in_flight[0])
        telemetry.meters.gauge(Metrics.TOKENS_IN_FLIGHT, lambda: control.in_flight[1])
        telemetry.meters.gauge(Metrics.IN_FLIGHT_SHARE, lambda: control.fullness)

    async def infer(
        self, request: InferenceRequest, span: Name = Spans.INFER, parts: TextParts | None = None
    ) -> InferenceResult:
        """Runs one input through the three stages, unless its result is cached.

        `span`: the name of the request's span. `parts`: gets the parts of a text as they come.
        """
        tenants = self.admission_control.tenants
        call = tenants.restrict(request.call) if tenants else request.call
        call = within_limit(call, self._context.settings)
        timings = RequestTimings(self._context.observer, span, call, self._held_items.new_time())
        try:
            with self._find(request) as model:
                timings.identify(model.key, model.meters, model.spec.task)
                request = with_long_texts(request, self._context.settings.long_texts)
                running = kind_of(request, model.spec)(
                    pipeline=self._context, request=request, call=call, model=model, timings=timings, parts=parts
                )
                if self._results and model.digest and running.is_repeatable:
                    # The work of another request, for which this one may wait, has its own deadline.
                    with Timeout(self._context.deadlines, call.deadline_s, running.too_late):
                        result, usage = await self._results.get(running)
                else:
                    result, usage = await running.answer()
        except BaseException as error:
            raise _recorded(timings, call, error)  # noqa: B904 (it has its cause)
        answered = running.finish(result, usage)
        self.copies.offer(running, answered, self._models.table)
        return answered

    async def generate(self, request: InferenceRequest, span: Name = Spans.GENERATE) -> AsyncGenerator[TextEvent, None]:
        """Yields the start of a text, its parts as they come, and the result of the request. Raises NeuronpipeError.

        The request has a task of its own, so that a caller who reads slowly does not hold a place in the gateway. Such
        a caller gets all waiting parts as one part. A generator that is closed ends the request.
        """
        parts = TextParts()
        answering = asyncio.create_task(self.infer(request, span, parts))
        answering.add_done_callback(lambda _: parts.close())
        try:
            while waiting := await parts.take():
                for part in waiting:
                    yield part
            yield await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def wait_to_begin(self, call: Call) -> None:
        """Waits until the next request of InferBatch or InferStream may begin. Tenants take turns."""
        await self._beginnings.take(call.caller.tenant)
        tenants = self.admission_control.tenants
        self._beginnings.leave_after(_SHARED_TURNS if tenants and tenants.are_several else 1)

    def check_room(self, remaining_s: float | None) -> None:
        """Sheds load before a request is read; see AdmissionControl.check_room."""
        try:
            self.admission_control.check_room(remaining_s, current_caller().tenant)
        except NeuronpipeError as error:
            self._context.observer.refused(error)
            raise

    def observe_together(self, call: Call, span: Name = Spans.INFER_BATCH) -> AbstractContextManager[Call]:
        """Observes a call of many requests as a span of its own. Yields the call of each request."""
        return self._context.observer.together(call, span)

    def _find(self, request: InferenceRequest) -> ServedModel[GatewayModel]:
        """Checks the fields of a request, and finds its model. Raises InvalidInput and ModelNotFound."""
        check_fields(request)
        table, tenants = self._models.table, self.admission_control.tenants
        table = tenants.table_of(request.call.caller, table) if tenants else table
        return table.find(request.model, request.version, request.call.route_key or request.call.request_id)


def _recorded(timings: RequestTimings, call: Call, error: BaseException) -> BaseException:
    """Records the error of a request. Returns the error that the caller gets: the same, or another with this cause."""
    caller_error = to_caller_error(error, call) if isinstance(error, Exception) else error
    timings.fail(caller_error)
    return caller_error
