"""What the gateway notes of a request. Its timings, its spans and the histograms are made of the same readings of one clock."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from neuronpipe.api.v1.inference_pb2 import InferResponse, StageTimings
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, Prediction
from neuronpipe.core.attributes import attributes_of, cache_word, priority_word
from neuronpipe.core.metrics import Counter, Meters, Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.stages import Call
from neuronpipe.core.telemetry import ADMISSION, REST, Attributes, Events, Instrument, Metrics, Name, Spans
from neuronpipe.core.tracing import Span, SpanContext, Tracer, enter_span, event_of, status_name

_STAGES = (Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
_PARTS = (*_STAGES, Spans.QUEUE, Spans.COMPUTE, REST)
_ENDS: dict[str, Instrument] = {Events.SHED: Metrics.SHED, Events.EXPIRED: Metrics.EXPIRED, Events.CANCELLED: Metrics.CANCELLED}


class Record:
    """One request from its arrival to its end."""

    def __init__(self, records: "Records", name: Name, call: Call) -> None:
        self._records = records
        self._call = call
        # When each stage began, and in the end when the last one was over.
        self._marks = [time.monotonic_ns()]
        self._stage: Name | None = None
        self._stage_span: Span | None = None
        # Handed over when the request has ended, so that this is in none of its durations.
        self._ended: list[Span] = []
        self._root = records.first_span(name, call, self._marks[0])
        self._model: ModelSpec | None = None
        self._encoded: EncodedInput | None = None
        self._prediction: Prediction | None = None

    def identify(self, model: ModelSpec, call: Call) -> None:
        """The model that was asked for, and the call that the stages get to see."""
        self._model, self._call = model, call

    def enter(self, stage: Name) -> ItemContext:
        """One stage's end and the next one's begin. Returns the next one's context; raises DeadlineExceeded where no time is left."""
        if self._stage is not None:
            self._marks.append(time.monotonic_ns())
        self._end_stage()
        self._stage = stage
        if self._root:
            self._stage_span = Span(stage, self._root.context.child(), self._root.context, self._marks[-1])
            self._call.traceparent = self._stage_span.context.traceparent
            enter_span(self._stage_span)
        return self._call.item_context()

    def encoded(self, encoded: EncodedInput) -> None:
        """What the first stage returned."""
        self._encoded = encoded
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(encoded)

    def predicted(self, prediction: Prediction) -> None:
        """What the second stage returned."""
        self._prediction = prediction
        if self._stage_span:
            self._stage_span.attributes |= attributes_of(prediction)

    def leave(self) -> None:
        """The last stage's end."""
        self._marks.append(time.monotonic_ns())
        self._end_stage()

    def finish(self, response: InferResponse) -> None:
        """Fills in the timings of a request whose answer is ready, and counts it."""
        ended_ns = time.monotonic_ns()
        timings, result_cache = response.timings, response.usage.result_cache
        timings.total_ns = ended_ns - self._marks[0]
        context = self._root.context if self._root else None
        meters = self._records.meters_of(self._model)
        meters.answered(timings.total_ns, result_cache, context)
        if self._root and result_cache:
            self._root.attributes[Attributes.RESULT_CACHE] = cache_word(result_cache)
        if self._encoded and self._prediction:  # else the result was known
            started_ns, preprocessed_ns, predicted_ns, postprocessed_ns = self._marks
            timings.preprocess_ns = preprocessed_ns - started_ns
            timings.predict_ns = predicted_ns - preprocessed_ns
            timings.postprocess_ns = postprocessed_ns - predicted_ns
            timings.predict_queue_ns = self._prediction.queue_ns
            timings.predict_compute_ns = self._prediction.compute_ns
            rest_ns = ended_ns - postprocessed_ns
            meters.computed(timings, rest_ns, self._encoded, context)
            if self._root:
                self._root.attributes |= attributes_of(self._encoded) | attributes_of(self._prediction) | {Attributes.REST_NS: rest_ns}
        if self._root:
            self._end(self._root, ended_ns, None)

    def fail(self, error: BaseException) -> None:
        """Counts a request that ends with an error, or whose caller left."""
        ended_ns = time.monotonic_ns()
        context = self._root.context if self._root else None
        self._records.meters_of(self._model).failed(ended_ns - self._marks[0], error, self._stage or ADMISSION, context)
        if self._stage_span:
            self._stage_span.fail(error, ended_ns)
            self._stage_span.ended_ns = ended_ns
            self._ended.append(self._stage_span)
        if self._root:
            self._end(self._root, ended_ns, error)

    def _end_stage(self) -> None:
        if self._stage_span:
            self._stage_span.ended_ns = self._marks[-1]
            self._ended.append(self._stage_span)
            self._stage_span = None

    def _end(self, root: Span, ended_ns: int, error: BaseException | None) -> None:
        root.attributes |= {Attributes.REQUEST_ID: self._call.request_id, Attributes.PRIORITY: priority_word(self._call.priority)}
        if self._model:
            version = str(self._model.version)
            root.attributes |= {Attributes.MODEL: self._model.name, Attributes.VERSION: version, Attributes.TASK: self._model.task}
        for span in self._ended:
            self._records.tracer.record(span)
        end_span(self._records.tracer, root, ended_ns, error)
        enter_span(None)


class Records:
    """Makes the records of a gateway's requests, and keeps the metrics of each model at hand."""

    def __init__(self, telemetry: Telemetry, models: Iterable[ModelSpec]) -> None:
        self.tracer = telemetry.tracer
        self._meters = telemetry.meters
        self._by_model: dict[int, _ModelMeters] = {}
        for model in models:
            self.meters_of(model)

    def begin(self, name: Name, call: Call) -> Record:
        """The record of a request that arrives now."""
        return Record(self, name, call)

    def meters_of(self, model: ModelSpec | None) -> "_ModelMeters":
        """A model's metrics; None for requests that name no model of ours."""
        found = self._by_model.get(id(model))  # of a few models that live as long as the gateway; hashing one takes microseconds
        if found is None:
            found = self._by_model[id(model)] = _ModelMeters(self._meters, model)
        return found

    def first_span(self, name: Name, call: Call, started_ns: int) -> Span | None:
        """The first span of a request or call, None unless it is sampled."""
        context, parent = self.tracer.begin(call.traceparent, call.tracestate)
        if context is None:
            return None
        span = Span(name, context, parent, started_ns)
        if "/" in name:
            span.kind = "server"
            span.attributes |= {Attributes.RPC_SYSTEM: "grpc", Attributes.RPC_METHOD: name}
        enter_span(span)
        return span

    @contextmanager
    def together(self, call: Call) -> Iterator[Call]:
        """A call with many requests. Yields the call of each of them, which are all sampled or none is."""
        span = self.first_span(Spans.INFER_BATCH, call, time.monotonic_ns()) if self.tracer.is_on else None
        if span:
            inner = Call(call.deadline_s, span.context.traceparent, call.tracestate)
        elif self.tracer.is_on and SpanContext.parse(call.traceparent) is None:
            inner = Call(call.deadline_s, SpanContext.new(is_sampled=False).traceparent, "")
        else:
            inner = call
        error: BaseException | None = None
        try:
            yield inner
        except BaseException as failure:
            error = failure
            raise
        finally:
            if span:
                end_span(self.tracer, span, time.monotonic_ns(), error)
                enter_span(None)


class _ModelMeters:
    def __init__(self, meters: Meters, model: ModelSpec | None) -> None:
        self._meters = meters
        self._labels = (model.name, str(model.version)) if model else ("", "")
        self._answered = meters.histogram(Metrics.REQUEST_DURATION, *self._labels, status_name(None))
        self._parts = [meters.histogram(Metrics.STAGE_DURATION, *self._labels, part) for part in _PARTS] if model else []
        self._tokens = meters.counter(Metrics.REQUEST_TOKENS, *self._labels)
        self._truncated = meters.counter(Metrics.REQUEST_TRUNCATED, *self._labels)
        self._lookups: dict[int, Counter] = {}
        for instrument in _ENDS.values():  # a rate from nothing to one is none
            for stage in (ADMISSION, *_STAGES) if model else ():
                meters.counter(instrument, *self._labels, stage)

    def answered(self, total_ns: int, result_cache: int, context: SpanContext | None) -> None:
        self._answered.record(total_ns, context)
        if result_cache:
            self._meters.counter(Metrics.RESULT_CACHE, *self._labels, cache_word(result_cache)).add()

    def computed(self, timings: StageTimings, rest_ns: int, encoded: EncodedInput, context: SpanContext | None) -> None:
        parts_ns = (
            timings.preprocess_ns,
            timings.predict_ns,
            timings.postprocess_ns,
            timings.predict_queue_ns,
            timings.predict_compute_ns,
            rest_ns,
        )
        for part, part_ns in zip(self._parts, parts_ns, strict=True):
            part.record(part_ns, context)
        self._tokens.add(encoded.tokens)
        self._truncated.add(encoded.truncated_tokens)
        lookups = self._lookups.get(encoded.token_cache)
        if lookups is None:
            word = cache_word(encoded.token_cache)
            lookups = self._lookups[encoded.token_cache] = self._meters.counter(Metrics.TOKEN_CACHE, *self._labels, word)
        lookups.add()

    def failed(self, total_ns: int, error: BaseException, stage: str, context: SpanContext | None) -> None:
        self._meters.histogram(Metrics.REQUEST_DURATION, *self._labels, status_name(error)).record(total_ns, context)
        if event := event_of(error):
            self._meters.counter(_ENDS[event], *self._labels, stage).add()


def end_span(tracer: Tracer, span: Span, ended_ns: int, error: BaseException | None) -> None:
    """Ends and records a span of an rpc, or of a request, with the status of the error."""
    span.ended_ns = ended_ns
    span.attributes[Attributes.RPC_STATUS] = status_name(error)
    if error:
        span.fail(error, ended_ns)
    tracer.record(span)
