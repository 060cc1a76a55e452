"""Records a request's timings, spans and histograms, all from the same readings of one clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from neuronpipe.api.v1.inference_pb2 import StageTimings
from neuronpipe.core.attributes import attributes_of, cache_word, priority_word
from neuronpipe.core.calls import Call
from neuronpipe.core.items import EncodedInput, ModelKey, Prediction
from neuronpipe.core.metrics import Counter, Meters, Telemetry
from neuronpipe.core.names import ADMISSION, UNATTRIBUTED, Attributes, Events, Instrument, Metrics, Name, Spans
from neuronpipe.core.tracing import Span, SpanContext, Tracer, enter_span, event_of, status_name
from neuronpipe.gateway.holding import HeldTime

_STAGES = (Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
_HTTP = (Spans.HTTP_REQUEST, Spans.HTTP_BATCH)
_PARTS = (*_STAGES, Spans.QUEUE, Spans.COMPUTE, UNATTRIBUTED)
_ENDS: dict[str, Instrument] = {
    Events.SHED: Metrics.SHED,
    Events.EXPIRED: Metrics.EXPIRED,
    Events.CANCELLED: Metrics.CANCELLED,
}


class ObservedRequest:
    """One request from its arrival to its end."""

    def __init__(self, observer: "RequestObserver", name: Name, call: Call) -> None:
        self._tracer = observer.tracer
        self._meters = observer.unknown
        self._call = call
        # When each stage began, and in the end when the last one was over.
        self._marks = [time.monotonic_ns()]
        self._stage: Name | None = None
        self._stage_span: Span | None = None
        # Handed over when the request has ended, so that this is in none of its durations.
        self._ended: list[Span] = []
        self._root = observer.first_span(name, call, self._marks[0])
        self._model: ModelKey | None = None
        self._task = ""
        self._encoded: EncodedInput | None = None
        self._prediction: Prediction | None = None
        self._first_token_ns = 0
        # For how long it was held; None where nothing is held.
        self.held: HeldTime | None = None

    def identify(self, model: ModelKey, meters: "ModelMeters", task: str) -> None:
        """Records the model that was found for the request, its metrics and its own task."""
        self._model, self._meters, self._task = model, meters, task

    def enter(self, stage: Name) -> SpanContext | None:
        """Ends one stage and begins the next. Returns the span of the next one's work, if the request is traced."""
        if self._stage is not None:
            self._marks.append(time.monotonic_ns())
        self._end_stage(self._marks[-1])
        self._stage = stage
        if not self._root:
            return self._tracer.unsampled(self._call.trace)
        self._stage_span = Span(stage, self._root.context.child(), self._root.context, self._marks[-1])
        enter_span(self._stage_span)
        return self._stage_span.context

    def encoded(self, encoded: EncodedInput) -> None:
        """Records the result of the first stage."""
        self._encoded = encoded
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(encoded)

    def predicted(self, prediction: Prediction, first_token_ns: int = 0) -> None:
        """Records the result of the second stage. `first_token_ns`: when a text had its first token."""
        self._prediction, self._first_token_ns = prediction, first_token_ns
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(prediction)

    def leave(self) -> None:
        """Ends the last stage."""
        self._marks.append(time.monotonic_ns())
        self._end_stage(self._marks[-1])

    def finish(self, result_cache: int) -> StageTimings:
        """Counts a request whose response is ready. Returns its timings."""
        ended_ns = time.monotonic_ns()
        total_ns = ended_ns - self._marks[0]
        root, encoded, prediction = self._root, self._encoded, self._prediction
        context = root.context if root else None
        self._meters.answered(total_ns, result_cache, context)
        if root and result_cache:
            root.attributes[Attributes.RESULT_CACHE] = cache_word(result_cache)
        if not (encoded and prediction):  # the result was known
            timings = StageTimings(total_ns=total_ns)
        else:
            started_ns, preprocessed_ns, predicted_ns, postprocessed_ns = self._marks
            timings = StageTimings(
                total_ns=total_ns,
                preprocess_ns=preprocessed_ns - started_ns,
                predict_ns=predicted_ns - preprocessed_ns,
                postprocess_ns=postprocessed_ns - predicted_ns,
                predict_queue_ns=prediction.queue_ns,
                predict_compute_ns=prediction.compute_ns,
            )
            if figures := prediction.generation:
                timings.first_token_ns = self._first_token_ns - started_ns
                timings.prefill_ns, timings.decode_ns = figures.prefill_ns, figures.decode_ns
                timings.longest_gap_ns = figures.longest_gap_ns
            if self.held:
                timings.held_ns = self.held.total_ns
            unattributed_ns = ended_ns - postprocessed_ns
            self._meters.computed(timings, unattributed_ns, encoded, context)
            if root and figures:
                root.attributes |= {
                    Attributes.FIRST_TOKEN_NS: timings.first_token_ns,
                    Attributes.PREFILL_NS: timings.prefill_ns,
                    Attributes.DECODE_NS: timings.decode_ns,
                    Attributes.LONGEST_GAP_NS: timings.longest_gap_ns,
                }
            if root:
                root.attributes |= (
                    attributes_of(encoded) | attributes_of(prediction) | {Attributes.UNATTRIBUTED_NS: unattributed_ns}
                )
        if root:
            self._end(root, ended_ns, None)
        return timings

    def fail(self, error: BaseException) -> None:
        """Counts a request that ends with an error, or whose caller left."""
        ended_ns = time.monotonic_ns()
        context = self._root.context if self._root else None
        self._meters.failed(ended_ns - self._marks[0], error, self._stage or ADMISSION, context)
        if self._stage_span:
            self._stage_span.fail(error, ended_ns)
            self._end_stage(ended_ns)
        if self._root:
            self._end(self._root, ended_ns, error)

    def _end_stage(self, ended_ns: int) -> None:
        if self._stage_span:
            self._stage_span.ended_ns = ended_ns
            self._ended.append(self._stage_span)
            self._stage_span = None

    def _end(self, root: Span, ended_ns: int, error: BaseException | None) -> None:
        root.attributes |= {
            Attributes.REQUEST_ID: self._call.request_id,
            Attributes.PRIORITY: priority_word(self._call.priority),
        }
        if tenant := self._call.caller.tenant:
            root.attributes[Attributes.TENANT] = tenant
        if self._model:
            name, version = self._model
            root.attributes |= {Attributes.MODEL: name, Attributes.VERSION: str(version), Attributes.TASK: self._task}
        for span in self._ended:
            self._tracer.record(span)
        _end_span(self._tracer, root, ended_ns, error)


class RequestObserver:
    """Observes a gateway's requests."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.tracer = telemetry.tracer
        # Of requests that name no model of ours.
        self.unknown = ModelMeters(telemetry.meters, None)

    def begin(self, name: Name, call: Call) -> ObservedRequest:
        """A request that arrives now; `name` is its span's."""
        return ObservedRequest(self, name, call)

    def refused(self, error: BaseException) -> None:
        """A request that is refused before it is read, so that its model is not known."""
        self.unknown.failed(0, error, ADMISSION, None)

    def first_span(self, name: Name, call: Call, started_ns: int) -> Span | None:
        """The first span of a request or call, None unless it is sampled."""
        context = self.tracer.begin(call.trace)
        if context is None:
            return None
        span = Span(name, context, call.trace, started_ns)
        if name in _HTTP:
            span.kind = "server"
        elif "/" in name:
            span.kind = "server"
            span.attributes |= {Attributes.RPC_SYSTEM: "grpc", Attributes.RPC_METHOD: name}
        enter_span(span)
        return span

    @contextmanager
    def together(self, call: Call, name: Name = Spans.INFER_BATCH) -> Iterator[Call]:
        """Observes a call of many requests as one span. Yields the call for each of them: all are sampled, or none."""
        if not self.tracer.is_on:
            yield call
            return
        span = self.first_span(name, call, time.monotonic_ns())
        if span is None:
            yield replace(call, trace=self.tracer.unsampled(call.trace) or SpanContext.new(is_sampled=False))
            return
        error: BaseException | None = None
        try:
            yield replace(call, trace=span.context)
        except BaseException as failure:
            error = failure
            raise
        finally:
            _end_span(self.tracer, span, time.monotonic_ns(), error)


class ModelMeters:
    """One model's metrics at hand; those of requests for no model of ours where there is no key."""

    def __init__(self, meters: Meters, model: ModelKey | None) -> None:
        self._meters = meters
        self._labels = (model.name, str(model.version)) if model else ("", "")
        self._answered = meters.histogram(Metrics.REQUEST_DURATION, *self._labels, status_name(None))
        self._parts = (
            [meters.histogram(Metrics.STAGE_DURATION, *self._labels, part) for part in _PARTS] if model else []
        )
        self._tokens = meters.counter(Metrics.REQUEST_TOKENS, *self._labels)
        self._truncated = meters.counter(Metrics.REQUEST_TRUNCATED, *self._labels)
        self._lookups: dict[int, Counter] = {}
        for instrument in _ENDS.values():  # a rate from nothing to one is none
            for stage in (ADMISSION, *_STAGES) if model else ():
                meters.counter(instrument, *self._labels, stage)

    def answered(self, total_ns: int, result_cache: int, context: SpanContext | None) -> None:
        """A request is answered."""
        self._answered.record(total_ns, context)
        if result_cache:
            self._meters.counter(Metrics.RESULT_CACHE, *self._labels, cache_word(result_cache)).add()

    def computed(
        self, timings: StageTimings, unattributed_ns: int, encoded: EncodedInput, context: SpanContext | None
    ) -> None:
        """An answer was computed."""
        parts_ns = (
            timings.preprocess_ns,
            timings.predict_ns,
            timings.postprocess_ns,
            timings.predict_queue_ns,
            timings.predict_compute_ns,
            unattributed_ns,
        )
        for part, part_ns in zip(self._parts, parts_ns, strict=True):
            part.record(part_ns, context)
        self._tokens.add(encoded.tokens)
        self._truncated.add(encoded.truncated_tokens)
        lookups = self._lookups.get(encoded.token_cache)
        if lookups is None:
            word = cache_word(encoded.token_cache)
            lookups = self._lookups[encoded.token_cache] = self._meters.counter(
                Metrics.TOKEN_CACHE, *self._labels, word
            )
        lookups.add()

    def failed(self, total_ns: int, error: BaseException, stage: str, context: SpanContext | None) -> None:
        """A request ended with an error."""
        self._meters.histogram(Metrics.REQUEST_DURATION, *self._labels, status_name(error)).record(total_ns, context)
        if event := event_of(error):
            self._meters.counter(_ENDS[event], *self._labels, stage).add()


def _end_span(tracer: Tracer, span: Span, ended_ns: int, error: BaseException | None) -> None:
    """Ends and records a span of an rpc, or of a request, with the status of the error; the task is in no span then."""
    span.ended_ns = ended_ns
    span.attributes[Attributes.RPC_STATUS] = status_name(error)
    if error:
        span.fail(error, ended_ns)
    tracer.record(span)
    enter_span(None)
