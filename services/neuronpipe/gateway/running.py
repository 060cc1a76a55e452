"""The main path: a request while it runs, from its admission to its answer.

The path knows stages only as functions of values: the same code runs over the network and in one process, behind every
door, and for shadow copies.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import Deadlines, Timeout
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError
from neuronpipe.core.items import (
    NO_PREDICTION,
    EncodedInput,
    ExecuteItem,
    PostprocessItem,
    Prediction,
    Stages,
    TokenizeItem,
    Work,
)
from neuronpipe.core.names import Name, Spans
from neuronpipe.gateway.admission import Admission, AdmissionControl
from neuronpipe.gateway.request_checks import check_input, check_tokens, has_image
from neuronpipe.gateway.request_observer import RequestObserver, RequestTimings
from neuronpipe.gateway.requests import InferenceRequest, InferenceResult, Result, TextParts
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings

# So the default limit of a million tokens in flight keeps images to 64 MiB of memory.
_IMAGE_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """The stages, limits, deadlines and counters that all running requests of a pipeline share."""

    stages: Stages
    settings: PipelineSettings
    admission_control: AdmissionControl
    deadlines: Deadlines
    observer: RequestObserver


@dataclass(eq=False, repr=False)
class RunningRequest:
    """One request from its admission to its answer. One task owns it.

    This class is for an input of a task: the tokenizer encodes it, the model computes it once, and the task decodes the
    outputs. kinds.py and generation.py have the other kinds of requests.

    - `request`: what the caller asked, never changed.
    - `call`: its call within the limits of the gateway.
    - `parts`: gets generated texts as they come; None for a caller who waits for the result.
    - `is_copy`: a shadow copy. The executor runs it after all requests that are within a tenant's share.
    """

    pipeline: PipelineContext
    request: InferenceRequest
    call: Call
    model: GatewayModel
    timings: RequestTimings
    parts: TextParts | None = None
    is_copy: bool = False

    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInput and WrongTask where the model does not take the input."""
        self.size_bytes = check_input(self.request, self.model.spec, self.pipeline.settings)

    async def answer(self) -> tuple[Result, Usage]:
        """Computes the result. The order of the `with` statements is the order in which the request waits."""
        # No field holds the timeout, which refers to the request: a cycle would outlive a request that is refused.
        timeout = Timeout(self.pipeline.deadlines, self.call.deadline_s, lambda: self._end_error(admission))
        with self._admit(timeout.expire) as admission, timeout:
            async with admission.turn(self.model.key.base):
                encoded = await self.tokenize(self._enter(admission, Spans.PREPROCESS, admission.tokens))
                self.timings.note_encoded(encoded)
                check_tokens(encoded, self.pipeline.settings)
                self.plan(admission, encoded)
                self.count(admission, encoded)

                work = self._enter(admission, Spans.PREDICT, encoded.tokens + self.new_tokens)
                prediction = NO_PREDICTION  # the tokenizer alone may have answered
                if encoded.sequences:
                    prediction = await self.execute(admission, work, encoded)
                self.timings.note_prediction(prediction)

                work = self._enter(admission, Spans.POSTPROCESS, encoded.tokens)
                result = await self.postprocess(work, encoded, prediction)
                self.timings.leave()
                return result, self.usage(encoded, prediction)

    def finish(self, result: Result, usage: Usage) -> InferenceResult:
        """Makes the answer. Its timings are the readings that spans and metrics show."""
        timings = self.timings.finish(self.first_token_ns, usage.result_cache)
        return InferenceResult(self.call.request_id, self.model.key, result, usage, timings)

    @property
    def known_tokens(self) -> int | None:
        """The cost of the input, where it is known before the input is tokenized."""
        if self.model.spec.image is None or not has_image(self.request, self.model.spec):
            return None
        # The tokens of an image are known, and its bytes take the memory.
        return self.model.spec.image_tokens + self.size_bytes // _IMAGE_BYTES_PER_TOKEN

    @property
    def is_repeatable(self) -> bool:
        """Whether equal requests have equal results, so that the gateway may keep one result for all of them."""
        return True

    @property
    def new_tokens(self) -> int:
        """The maximum number of tokens that the request generates."""
        return 0

    @property
    def first_token_ns(self) -> int:
        """The time of the first generated token on time.monotonic_ns(); 0 if there is none."""
        return 0

    # The stages return awaitables: a coroutine around each would cost a request a microsecond.

    def tokenize(self, work: Work) -> Awaitable[EncodedInput]:
        """Makes sequences of the input."""
        return self.pipeline.stages.tokenize(TokenizeItem(self.call, self.model.key, self.request.input, work=work))

    def plan(self, admission: Admission, encoded: EncodedInput) -> None:
        """Makes the texts of a request that generates. Raises InvalidInput."""

    def count(self, admission: Admission, encoded: EncodedInput) -> None:
        """Replaces the estimates of admission control by the tokens of the input. Raises Overloaded."""
        admission.count(encoded.tokens, self.new_tokens)

    def execute(self, admission: Admission, work: Work, encoded: EncodedInput) -> Awaitable[Prediction]:
        """Computes the outputs of the sequences."""
        return self.pipeline.stages.execute(ExecuteItem(self.call, self.model.key, encoded.sequences, work=work))

    def postprocess(self, work: Work, encoded: EncodedInput, prediction: Prediction) -> Awaitable[Result]:
        """Makes the result of the outputs."""
        input, annotations, outputs = self.request.input, encoded.annotations, prediction.outputs
        item = PostprocessItem(self.call, self.model.key, input, annotations, outputs, work=work)
        return self.pipeline.stages.postprocess(item)

    def usage(self, encoded: EncodedInput, prediction: Prediction) -> Usage:
        """Returns the cost of the request, as its caller is told."""
        return Usage(
            tokens=encoded.tokens,
            truncated_tokens=encoded.truncated_tokens,
            batch_size=prediction.batch_size,
            bucket_tokens=prediction.bucket_tokens,
            token_cache=encoded.token_cache,
            padded_tokens=prediction.padded_tokens,
        )

    def too_late(self) -> DeadlineExceeded:
        """Makes the error for a deadline that has passed."""
        # Not by the clock: an event loop's timers may be some milliseconds early.
        if self.call.deadline_s == self.request.call.deadline_s:
            return DeadlineExceeded("the deadline passed before the result was ready")
        limit_s = self.pipeline.settings.max_request_s
        return DeadlineExceeded(f"the result was not ready after {limit_s:g} s, the gateway's max_request_s")

    def _admit(self, shed: Callable[[], None]) -> Admission:
        """Takes the request's place in admission control. `shed`: ends the request to make room for another request.

        Raises Overloaded and DeadlineExceeded.
        """
        return self.pipeline.admission_control.admit(
            self.call,
            self.size_bytes,
            self.known_tokens,
            model=self.model.key.name,
            new_tokens=self.new_tokens,
            shed=shed,
            held=self.timings.held,
        )

    def _enter(self, admission: Admission, stage: Name, cost_tokens: int) -> Work:
        """Begins a stage. Raises DeadlineExceeded if no time is left for it."""
        trace = self.timings.enter(stage)
        self.call.check_deadline(has_begun=stage is not Spans.PREPROCESS)
        if turn := admission.own_turn:
            return Work(trace, cost_tokens, turn.is_beyond_share, turn.weight, self.timings.held)
        return Work(trace, cost_tokens, self.is_copy, 1.0, self.timings.held)

    def _end_error(self, admission: Admission) -> NeuronpipeError:
        """Makes the error for a request that ends before its result is ready."""
        if admission.is_shed:
            return self.pipeline.admission_control.shed_error(admission)
        held, (name, version) = self.timings.held, self.model.key
        if held and held.service:
            return DeadlineExceeded(
                f"the deadline passed while the request was held: no process of the {held.service} service has model "
                f"{name!r} version {version} yet"
            )
        return self.too_late()
