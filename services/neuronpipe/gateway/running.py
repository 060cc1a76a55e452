"""The main path: a request while it runs, from its arrival to its answer.

The path knows stages only as functions of values: the same code runs over the network and in one process, behind every
door, and for shadow copies.
"""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.core.calls import Call, told_error
from neuronpipe.core.deadlines import Deadlines, Timeout
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError
from neuronpipe.core.items import NO_PREDICTION, EncodedInput, Prediction, Stages, Work
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.admission import Admission, Gate
from neuronpipe.gateway.generation import GeneratedText, TextParts
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult, Result
from neuronpipe.gateway.kinds import OwnTensors, PlainInput
from neuronpipe.gateway.request_checks import check_tokens, within_limit
from neuronpipe.gateway.request_observer import RequestTimings
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.tenants.turns import Turn
from neuronpipe.tasks import TASKS


async def answer(running: "RunningRequest", stages: Stages) -> tuple[Result, Usage]:
    """Computes the result of a request. The order of the blocks is the order in which the request waits."""
    with running.admitted(), running.until_deadline():
        async with running.tenant_turn():
            encoded = await running.preprocess(stages)
            prediction = await running.predict(stages, encoded)
            return await running.postprocess(stages, encoded, prediction)


class RunningRequest:
    """One request from its arrival to its answer. One task owns it, and the block that it is the context manager of
    records its error.

    `request`: what the caller asked, never changed. `call`: its call within the limits of the gateway. `timings`: the
    spans, the readings of the clock, and the time for which items are held. `values`: the values of the first two
    stages, once they are there. `parts`: gets the texts as they come.
    """

    model: GatewayModel
    kind: PlainInput
    admission: Admission
    values: tuple[EncodedInput, Prediction] | None = None

    def __init__(
        self,
        request: InferenceRequest,
        call: Call,
        gate: Gate,
        deadlines: Deadlines,
        settings: PipelineSettings,
        timings: RequestTimings,
        *,
        parts: TextParts | None = None,
        is_copy: bool = False,
    ) -> None:
        """`is_copy`: the request goes behind all requests of tenants within their shares."""
        self.request = request
        self.call = within_limit(call, settings)
        self.timings = timings
        self._gate, self._deadlines, self._settings = gate, deadlines, settings
        self._parts, self._is_copy = parts, is_copy

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        told = told_error(error, self.call) if isinstance(error, Exception) else error
        self.timings.fail(told)
        try:
            if told is not error:
                raise told from error
        finally:
            del told, error  # the error keeps this frame

    def identify(self, model: GatewayModel) -> None:
        """Takes the model that was found for the request. Raises InvalidInput and WrongTask."""
        self.model = model
        self.timings.identify(model.key, model.meters, model.spec.task)
        request, task = self.request, TASKS[model.spec.task]
        if task.generates and not request.encoded and request.input.task == task.name:
            self.kind = GeneratedText(request, self.call, model, self._settings, self._parts)
        else:
            self.kind = (OwnTensors if request.encoded else PlainInput)(request, self.call, model, self._settings)

    def admitted(self) -> Admission:
        """Takes the request's place in the gate. Raises Overloaded and DeadlineExceeded."""
        kind = self.kind
        self.admission = self._gate.admit(
            self.call,
            kind.size_bytes,
            kind.known_tokens,
            model=self.model.key.name,
            new_tokens=kind.new_tokens,
            shed=lambda: self._timeout.expire(),
            held=self.timings.held,
        )
        return self.admission

    def until_deadline(self) -> Timeout:
        """Ends the block at the deadline of the request, or when the request is shed."""
        self._timeout = Timeout(self._deadlines, self.call.deadline_s, self._end_error)
        return self._timeout

    def tenant_turn(self) -> AbstractAsyncContextManager[Turn | None]:
        """Waits for the turn of the request's tenant."""
        return self.admission.turn(self.model.key)

    async def preprocess(self, stages: Stages) -> EncodedInput:
        """Makes sequences of the input. Their tokens replace the estimates of admission control."""
        work = self._enter(Spans.PREPROCESS, self.admission.tokens)
        encoded = await self.kind.preprocess(stages, work)
        self.timings.note(encoded)
        check_tokens(encoded, self._settings)
        self.kind.note_encoded(encoded)
        self.admission.count(encoded.tokens, self.kind.new_tokens)
        return encoded

    async def predict(self, stages: Stages, encoded: EncodedInput) -> Prediction:
        """Computes the outputs of the sequences."""
        work = self._enter(Spans.PREDICT, encoded.tokens + self.kind.new_tokens)
        prediction = NO_PREDICTION  # where the tokenizer alone has answered
        if encoded.sequences:
            prediction = await self.kind.predict(stages, work, encoded, self.admission)
        self.values = encoded, prediction
        self.timings.note(prediction)
        return prediction

    async def postprocess(self, stages: Stages, encoded: EncodedInput, prediction: Prediction) -> tuple[Result, Usage]:
        """Makes the result of the outputs."""
        work = self._enter(Spans.POSTPROCESS, encoded.tokens)
        result = await self.kind.postprocess(stages, work, encoded, prediction)
        self.timings.leave()
        return result, self.kind.usage(encoded, prediction)

    def finish(self, result: Result, usage: Usage) -> InferenceResult:
        """Makes the answer. Its timings are the readings that spans and metrics show."""
        timings = self.timings.finish(self.values, self.kind.first_token_ns, usage.result_cache)
        return InferenceResult(self.call.request_id, self.model.key, result, usage, timings)

    def too_late(self) -> DeadlineExceeded:
        """Makes the error for a deadline that has passed."""
        # Not by the clock: an event loop's timers may be some milliseconds early.
        if self.call.deadline_s == self.request.call.deadline_s:
            return DeadlineExceeded("the deadline passed before the result was ready")
        limit_s = self._settings.max_request_s
        return DeadlineExceeded(f"the result was not ready after {limit_s:g} s, the gateway's max_request_s")

    def _enter(self, stage: Name, cost_tokens: int) -> Work:
        """Begins a stage. Raises DeadlineExceeded if no time is left for it."""
        trace = self.timings.enter(stage)
        self.call.check_deadline()
        if turn := self.admission.own_turn:
            return Work(trace, cost_tokens, turn.is_beyond_share, turn.weight, self.timings.held)
        return Work(trace, cost_tokens, self._is_copy, 1.0, self.timings.held)

    def _end_error(self) -> NeuronpipeError:
        """Makes the error for a request that ends before its result is ready."""
        if self.admission.is_shed:
            return self._gate.shed_error(self.admission)
        held, (name, version) = self.timings.held, self.model.key
        if held and held.service:
            return DeadlineExceeded(
                f"the deadline passed while the request was held: no process of the {held.service} service has model "
                f"{name!r} version {version} yet"
            )
        return self.too_late()
