"""Copies of requests for a version whose answers no caller gets: how far it agrees, and how long it takes.

A copy is made of a request that has its answer, so it can change or delay nothing. It is the last work of all: it takes
no place in the gateway's admission control, waits behind bulk requests in the executor, and is dropped when the gateway
is half full, or when the limit of copies is reached.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neuronpipe.api.v1.inference_pb2 import CacheOutcome, Priority
from neuronpipe.bundles.served import ModelState, ServedModel
from neuronpipe.core.calls import Call, told_error
from neuronpipe.core.deadlines import Deadlines
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import ModelTable
from neuronpipe.core.names import Metrics, Spans
from neuronpipe.core.packed import Packed
from neuronpipe.core.tracing import SpanContext
from neuronpipe.gateway.admission import Gate
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult
from neuronpipe.gateway.request_observer import RequestObserver
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.running import RunningRequest, answer
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.platform.process.background import run_beside

MAX_COPIES = 16
# The share of the gateway's admission control beyond which copies are dropped.
_FULL_SHARE = 0.5
# A copy that takes this many times as long as the answer took is too late, but not before a second.
_LONGEST_RATIO, _SHORTEST_LIMIT_S = 10, 1.0

# Copies may have this part of the gateway's limit of tokens.
_TOKENS_PART = 8
_HITS = (CacheOutcome.CACHE_OUTCOME_HIT_MEMORY, CacheOutcome.CACHE_OUTCOME_HIT_REDIS)

_ANSWER, _COPY = "answer", "copy"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A request with its answer, and the version that gets a copy."""

    request: InferenceRequest
    answer: InferenceResult
    shadow: ServedModel[GatewayModel]


class ShadowCopies:
    """The copies of a gateway. `gate`: the gate of requests. Copies have a gate of their own."""

    def __init__(
        self,
        stages: Stages,
        gate: Gate,
        deadlines: Deadlines,
        settings: PipelineSettings,
        observer: RequestObserver,
        meters: Meters,
    ) -> None:
        self._stages = stages
        self._gate = gate
        self._own_gate = Gate(2 * MAX_COPIES, settings.max_tokens_in_flight // _TOKENS_PART, forecasts=False)
        self._deadlines = deadlines
        self._settings = settings
        self._observer = observer
        self._meters = meters
        self._waiting: asyncio.Queue[_Pair] = asyncio.Queue(MAX_COPIES)

    def offer(
        self, running: RunningRequest, answer: InferenceResult, table: ModelTable[ServedModel[GatewayModel]]
    ) -> None:
        """Records the answer of a request, if the model has versions to compare, and copies the request to the model's
        shadow with the share that the shadow has. Does not wait.
        """
        request, model = running.request, running.model
        route = table.routes.get(model.key.name)
        if not route or not route.compares or request.encoded or answer.usage.result_cache in _HITS:
            return
        self._took(model, _ANSWER, answer.timings.total_ns)
        shadow = table.find_shadow(*model.key, answer.request_id)
        if not shadow or request.version:
            return
        if self._gate.share >= _FULL_SHARE or self._waiting.full():
            self._count(shadow, "dropped")
        else:
            self._waiting.put_nowait(_Pair(request, answer, shadow))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works on copies beside the block; what is under way at its end is given up."""
        async with run_beside(*(self._work() for _ in range(MAX_COPIES))):
            yield

    async def _work(self) -> None:
        while True:
            pair = await self._waiting.get()
            try:
                outcome = await self._run(pair)
            except Exception as fault:
                error = told_error(fault, pair.request.call)
                is_late = isinstance(error, DeadlineExceeded)
                outcome = "late" if is_late else "dropped" if isinstance(error, Overloaded) else "failed"
            self._count(pair.shadow, outcome)

    async def _run(self, pair: _Pair) -> str:
        """Computes and compares a copy. Returns what became of it. Raises what computing raises."""
        if self._gate.share >= _FULL_SHARE or pair.shadow.state is not ModelState.READY:
            return "dropped"
        with pair.shadow as model:
            began_ns = time.monotonic_ns()
            call = _call_of_copy(pair)
            timings = self._observer.begin(Spans.INFER, call)  # in no trace, and not counted among requests
            copy = RunningRequest(
                pair.request, call, self._own_gate, self._deadlines, self._settings, timings, is_copy=True
            )
            copy.identify(model)
            result, _ = await answer(copy, self._stages)
            assert isinstance(result, Packed)  # noqa: S101 (requests with tensors are not copied)
            self._took(model, _COPY, time.monotonic_ns() - began_ns)
        from neuronpipe.tasks.result_agreement import result_agreement  # gateways without shadows need none of it

        agreement = await asyncio.to_thread(
            result_agreement, pair.request.input.message, model.spec, pair.answer.result.message, result.message
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


def _call_of_copy(pair: _Pair) -> Call:
    """Makes the call of a copy: the last work of all, in no trace, and with a deadline of its own."""
    limit_s = max(_SHORTEST_LIMIT_S, _LONGEST_RATIO * pair.answer.timings.total_ns / 1e9)
    return Call(
        request_id=pair.request.call.request_id,
        deadline_s=time.monotonic() + limit_s,
        priority=Priority.PRIORITY_BULK,
        trace=SpanContext.new(is_sampled=False),
        caller=pair.request.call.caller,
    )
