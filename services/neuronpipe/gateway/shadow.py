"""Shadow copies: copies of requests for a version whose answers are compared, and which no caller gets.

A copy is made of a request that has its answer, so it cannot change or delay that answer. Copies take no place in the
gateway's admission control. In the executor they wait like bulk requests of a tenant beyond its share: behind all other
requests. They are dropped when the gateway is half full, when the limit of copies is reached, or when the version is
not ready.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from neuronpipe.api.v1.inference_pb2 import CacheOutcome, Priority
from neuronpipe.bundles.served import ModelState, ServedModel
from neuronpipe.core.calls import Call, to_caller_error
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import ModelTable
from neuronpipe.core.names import Metrics, Spans
from neuronpipe.core.packed import Packed
from neuronpipe.core.tracing import SpanContext
from neuronpipe.gateway.admission import AdmissionControl
from neuronpipe.gateway.kinds import kind_of
from neuronpipe.gateway.request_checks import within_limit
from neuronpipe.gateway.request_observer import RequestTimings
from neuronpipe.gateway.requests import InferenceRequest, InferenceResult
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.running import PipelineContext, RunningRequest
from neuronpipe.platform.process.background import run_beside

MAX_COPIES = 16
# The share of the gateway's admission control beyond which copies are dropped.
_FULL_SHARE = 0.5
# A copy is late after this multiple of the time of the answer, and after a second at the earliest.
_LONGEST_RATIO, _SHORTEST_LIMIT_S = 10, 1.0
# Copies get this part of the gateway's limit of tokens, as a divisor.
_TOKENS_PART = 8
_HITS = (CacheOutcome.CACHE_OUTCOME_HIT_MEMORY, CacheOutcome.CACHE_OUTCOME_HIT_REDIS)

_ANSWER, _COPY = "answer", "copy"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A request with its answer, and the version that gets the copy."""

    request: InferenceRequest
    answer: InferenceResult
    shadow: ServedModel[GatewayModel]


class ShadowCopies:
    """The copies of a gateway. They have admission control of their own. `pipeline`: the pipeline's context."""

    def __init__(self, pipeline: PipelineContext, meters: Meters) -> None:
        self._admission_control = pipeline.admission_control
        max_tokens = pipeline.settings.max_tokens_in_flight // _TOKENS_PART
        self._context = replace(
            pipeline, admission_control=AdmissionControl(2 * MAX_COPIES, max_tokens, forecasts=False)
        )
        self._meters = meters
        self._waiting: asyncio.Queue[_Copy] = asyncio.Queue(MAX_COPIES)

    def offer(
        self, running: RunningRequest, answer: InferenceResult, table: ModelTable[ServedModel[GatewayModel]]
    ) -> None:
        """Records the answer of a request whose model has versions to compare. Copies the request to the model's
        shadow, if it belongs to the share of the shadow. Does not wait.
        """
        request, model = running.request, running.model
        route = table.routes.get(model.key.name)
        if not route or not route.compares or request.encoded or answer.usage.result_cache in _HITS:
            return
        self._took(model, _ANSWER, answer.timings.total_ns)
        shadow = table.find_shadow(*model.key, answer.request_id)
        if not shadow or request.version:
            return
        if self._admission_control.fullness >= _FULL_SHARE or self._waiting.full():
            self._count(shadow, "dropped")
        else:
            self._waiting.put_nowait(_Copy(request, answer, shadow))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works on copies beside the block, whose end gives up the running copies."""
        async with run_beside(*(self._work() for _ in range(MAX_COPIES))):
            yield

    async def _work(self) -> None:
        while True:
            copy = await self._waiting.get()
            try:
                outcome = await self._run(copy)
            except Exception as fault:
                error = to_caller_error(fault, copy.request.call)
                is_late = isinstance(error, DeadlineExceeded)
                outcome = "late" if is_late else "dropped" if isinstance(error, Overloaded) else "failed"
            self._count(copy.shadow, outcome)

    async def _run(self, copy: _Copy) -> str:
        """Computes and compares a copy. Returns its outcome. Raises the errors of computing."""
        if self._admission_control.fullness >= _FULL_SHARE or copy.shadow.state is not ModelState.READY:
            return "dropped"
        with copy.shadow as model:
            began_ns = time.monotonic_ns()
            call = within_limit(_call_of_copy(copy), self._context.settings)
            # Copies are in no trace, and are not counted among requests.
            timings = RequestTimings(self._context.observer, Spans.INFER, call)
            kind = kind_of(copy.request, model.spec)
            result, _ = await kind(self._context, copy.request, call, model, timings, is_copy=True).answer()
            assert isinstance(result, Packed)  # noqa: S101 (requests with tensors are not copied)
            self._took(model, _COPY, time.monotonic_ns() - began_ns)
        from neuronpipe.tasks.result_agreement import result_agreement  # gateways without shadows need none of it

        agreement = await asyncio.to_thread(
            result_agreement, copy.request.input.message, model.spec, copy.answer.result.message, result.message
        )
        if agreement is None:
            return "incomparable"
        self._meters.histogram(Metrics.SHADOW_AGREEMENT, model.key.name, str(model.key.version)).record(agreement)
        return "compared"

    def _took(self, model: GatewayModel, role: str, total_ns: int) -> None:
        name, version = model.key
        self._meters.histogram(Metrics.VERSION_DURATION, name, str(version), role).record(total_ns)

    def _count(self, shadow: ServedModel[GatewayModel], outcome: str) -> None:
        name, version = shadow.key
        self._meters.counter(Metrics.SHADOW_COPIES, name, str(version), outcome).add()


def _call_of_copy(copy: _Copy) -> Call:
    """Makes the call of a copy: bulk, in no trace, and with a deadline of its own."""
    limit_s = max(_SHORTEST_LIMIT_S, _LONGEST_RATIO * copy.answer.timings.total_ns / 1e9)
    return Call(
        request_id=copy.request.call.request_id,
        deadline_s=time.monotonic() + limit_s,
        priority=Priority.PRIORITY_BULK,
        trace=SpanContext.new(is_sampled=False),
        caller=copy.request.call.caller,
    )
