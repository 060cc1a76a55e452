"""Records a request's timings, spans and histograms, all from the same readings of one clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from neuronpipe.api.v1.inference_pb2 import CacheOutcome, StageTimings
from neuronpipe.core.attributes import attributes_of, cache_word, priority_word
from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.items import EncodedInput, ModelKey, Prediction
from neuronpipe.core.logs import log_request, logs_requests
from neuronpipe.core.metrics import Counter, Meters, Telemetry
from neuronpipe.core.names import ADMISSION, UNATTRIBUTED, Attributes, Events, Instrument, Metrics, Name, Spans
from neuronpipe.core.tracing import Span, SpanContext, Tracer, enter_span, event_of, status_name

_STAGES = (Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
_HTTP = (Spans.HTTP_REQUEST, Spans.HTTP_BATCH)
_PARTS = (*_STAGES, Spans.QUEUE, Spans.COMPUTE, UNATTRIBUTED)
_ENDS: dict[str, Instrument] = {
    Events.SHED: Metrics.SHED,
    Events.EXPIRED: Metrics.EXPIRED,
    Events.CANCELLED: Metrics.CANCELLED,
}


class RequestTimings:
    """The readings of the clock for one request, and the spans that show them.

    `marks_ns`: the arrival of the request, the border between each stage and the next, and the end of the last stage.
    `held`: the time for which its items were held; None where nothing is held.
    """

    def __init__(self, observer: "RequestObserver", name: Name, call: Call, held: HeldTime | None = None) -> None:
        """Begins the timings of a request that arrives now. `name`: the name of its span."""
        self._tracer = observer.tracer
        self._meters = observer.unknown
        self.marks_ns = [time.monotonic_ns()]
        self.held = held
        self._encoded: EncodedInput | None = None
        self._prediction: Prediction | None = None
        self._stage: Name | None = None
        self._stage_span: Span | None = None
        # Recorded when the request has ended, so that recording is in none of its durations.
        self._ended: list[Span] = []
        # The fields of the request's line in the log.
        self._line: dict[str, object] | None = None
        if logs_requests():
            self._line = {"call": str(name), "request_id": call.request_id, "tenant": call.caller.tenant}
        self._root = root = observer.first_span(name, call, self.marks_ns[0])
        if root:
            root.attributes |= {
                Attributes.REQUEST_ID: call.request_id,
                Attributes.PRIORITY: priority_word(call.priority),
            }
            if call.caller.tenant:
                root.attributes[Attributes.TENANT] = call.caller.tenant
        self._passed_on = None if root else self._tracer.unsampled(call.trace)

    def identify(self, model: ModelKey, meters: "ModelMeters", task: str) -> None:
        """Records the model that was found for the request, its metrics and its own task."""
        self._meters = meters
        name, version = model
        if self._line:
            self._line |= {"model": name, "version": version, "task": task}
        if self._root:
            self._root.attributes |= {Attributes.MODEL: name, Attributes.VERSION: str(version), Attributes.TASK: task}

    def enter(self, stage: Name) -> SpanContext | None:
        """Ends one stage and begins the next. Returns the span of the next stage's work, if the request is traced."""
        if self._stage is not None:
            self.leave()
        self._stage = stage
        if not self._root:
            return self._passed_on
        self._stage_span = Span(stage, self._root.context.child(), self._root.context, self.marks_ns[-1])
        enter_span(self._stage_span)
        return self._stage_span.context

    def note_encoded(self, encoded: EncodedInput) -> None:
        """Records the encoded input, the result of pre-processing."""
        self._encoded = encoded
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(encoded)

    def note_prediction(self, prediction: Prediction) -> None:
        """Records the prediction."""
        self._prediction = prediction
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(prediction)

    def leave(self) -> None:
        """Ends a stage."""
        self.marks_ns.append(time.monotonic_ns())
        self._end_stage(self.marks_ns[-1])

    def finish(
        self, first_token_ns: int = 0, result_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED
    ) -> StageTimings:
        """Records a request whose answer is ready. Returns its readings, which spans and metrics also show."""
        ended_ns = time.monotonic_ns()
        root = self._root
        context, attributes = (root.context, root.attributes) if root else (None, {})
        total_ns = ended_ns - self.marks_ns[0]
        self._meters.answered(total_ns, result_cache, context)
        if result_cache:
            attributes[Attributes.RESULT_CACHE] = cache_word(result_cache)
        if self._encoded is None or self._prediction is None:  # the result was known
            timings = StageTimings(total_ns=total_ns)
        else:
            timings = self._stage_timings(total_ns, self._prediction, first_token_ns)
            unattributed_ns = ended_ns - self.marks_ns[-1]
            self._meters.computed(timings, unattributed_ns, self._encoded, context)
            if root:
                attributes |= attributes_of(self._encoded) | attributes_of(self._prediction)
                attributes[Attributes.UNATTRIBUTED_NS] = unattributed_ns
            if root and self._prediction.generation:
                attributes |= {
                    Attributes.FIRST_TOKEN_NS: timings.first_token_ns,
                    Attributes.PREFILL_NS: timings.prefill_ns,
                    Attributes.DECODE_NS: timings.decode_ns,
                    Attributes.LONGEST_GAP_NS: timings.longest_gap_ns,
                }
        self._end(ended_ns, None)
        return timings

    def fail(self, error: BaseException) -> None:
        """Records a request that ends with an error, or whose caller has left."""
        ended_ns = time.monotonic_ns()
        context = self._root.context if self._root else None
        self._meters.failed(ended_ns - self.marks_ns[0], error, self._stage or ADMISSION, context)
        if self._stage_span:
            self._stage_span.fail(error, ended_ns)
            self._end_stage(ended_ns)
        self._end(ended_ns, error)

    def _stage_timings(self, total_ns: int, prediction: Prediction, first_token_ns: int) -> StageTimings:
        began_ns, preprocessed_ns, predicted_ns, postprocessed_ns = self.marks_ns
        timings = StageTimings(
            total_ns=total_ns,
            preprocess_ns=preprocessed_ns - began_ns,
            predict_ns=predicted_ns - preprocessed_ns,
            postprocess_ns=postprocessed_ns - predicted_ns,
            predict_queue_ns=prediction.queue_ns,
            predict_compute_ns=prediction.compute_ns,
        )
        if figures := prediction.generation:
            timings.first_token_ns = first_token_ns - began_ns
            timings.prefill_ns, timings.decode_ns = figures.prefill_ns, figures.decode_ns
            timings.longest_gap_ns = figures.longest_gap_ns
        if self.held:
            timings.held_ns = self.held.total_ns
        return timings

    def _end_stage(self, ended_ns: int) -> None:
        if self._stage_span:
            self._stage_span.ended_ns = ended_ns
            self._ended.append(self._stage_span)
            self._stage_span = None

    def _end(self, ended_ns: int, error: BaseException | None) -> None:
        if self._line:
            tokens = self._encoded.tokens if self._encoded else 0
            duration_ms = (ended_ns - self.marks_ns[0]) / 1e6
            log_request(**self._line, status=status_name(error), duration_ms=round(duration_ms, 3), tokens=tokens)
        if self._root:
            for span in self._ended:
                self._tracer.record(span)
            _end_span(self._tracer, self._root, ended_ns, error)


class RequestObserver:
    """Observes a gateway's requests. `unknown`: the metrics of requests whose model is not served."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.tracer = telemetry.tracer
        self.unknown = ModelMeters(telemetry.meters, None)

    def refused(self, error: BaseException) -> None:
        """Counts a request that is refused before it is read, so that its model is not known."""
        self.unknown.failed(0, error, ADMISSION, None)
        if logs_requests():
            log_request(tenant=current_caller().tenant, status=status_name(error), duration_ms=0, tokens=0)

    def first_span(self, name: Name, call: Call, started_ns: int) -> Span | None:
        """Begins the first span of a request or call; None unless it is sampled."""
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
        """Observes a call of many requests as one span. Yields the call of each request: all are sampled, or none."""
        if not self.tracer.is_on:
            yield call
            return
        span = self.first_span(name, call, time.monotonic_ns())
        if span is None:
            yield call._replace(trace=self.tracer.unsampled(call.trace) or SpanContext.new(is_sampled=False))
            return
        error: BaseException | None = None
        try:
            yield call._replace(trace=span.context)
        except BaseException as failure:
            error = failure
            raise
        finally:
            _end_span(self.tracer, span, time.monotonic_ns(), error)


class ModelMeters:
    """The metrics of one model. Without a key: the metrics of requests for models that are not served."""

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
        for instrument in _ENDS.values():  # the rate of a series that begins with 1 would miss it
            for stage in (ADMISSION, *_STAGES) if model else ():
                meters.counter(instrument, *self._labels, stage)

    def answered(self, total_ns: int, result_cache: int, context: SpanContext | None) -> None:
        """Counts a request that is answered."""
        self._answered.record(total_ns, context)
        if result_cache:
            self._meters.counter(Metrics.RESULT_CACHE, *self._labels, cache_word(result_cache)).add()

    def computed(
        self, timings: StageTimings, unattributed_ns: int, encoded: EncodedInput, context: SpanContext | None
    ) -> None:
        """Records the stages of an answer that was computed."""
        stages_ns = timings.preprocess_ns, timings.predict_ns, timings.postprocess_ns
        parts_ns = (*stages_ns, timings.predict_queue_ns, timings.predict_compute_ns, unattributed_ns)
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
        """Counts a request that ended with an error."""
        self._meters.histogram(Metrics.REQUEST_DURATION, *self._labels, status_name(error)).record(total_ns, context)
        if event := event_of(error):
            self._meters.counter(_ENDS[event], *self._labels, stage).add()


def _end_span(tracer: Tracer, span: Span, ended_ns: int, error: BaseException | None) -> None:
    """Ends and records the span of an rpc or a request, with the status of the error. Then the task is in no span."""
    span.ended_ns = ended_ns
    span.attributes[Attributes.RPC_STATUS] = status_name(error)
    if error:
        span.fail(error, ended_ns)
    tracer.record(span)
    enter_span(None)
