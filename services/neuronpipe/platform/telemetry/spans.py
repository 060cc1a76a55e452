"""Exports spans to a collector by OpenTelemetry's exporters and batch processor, and counts lost spans."""

import threading
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags, TraceState

from neuronpipe.core.metrics import Counter, Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.tracing import Clock, Span, SpanContext

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_STATE = TraceState()
_OK, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_SCOPE = InstrumentationScope("neuronpipe")
# Time limit of the last export, which runs when the service ends.
_LAST_EXPORT_LIMIT_S = 3.0


class SpanQueue:
    """Queues spans without blocking, and exports them from a thread.

    Spans beyond the queue's size are dropped and counted.
    """

    def __init__(
        self, exporter: SpanExporter, resource: Resource, clock: Clock, meters: Meters, max_spans: int
    ) -> None:
        self._exporter = _Counting(exporter, meters)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=max_spans, max_export_batch_size=min(512, max_spans)
        )
        self._dropped = meters.counter(Metrics.SPANS, "dropped")
        self._resource, self._clock, self._max_spans = resource, clock, max_spans
        self._accepted = 0

    def add(self, span: Span) -> None:
        # The processor would drop the oldest span and log each drop; spans that are dropped here are counted.
        if self._accepted - self._exporter.taken >= self._max_spans:
            self._dropped.add()
            return
        self._accepted += 1
        self._processor.on_end(self._to_sdk(span))

    def close(self) -> None:
        """Exports the remaining spans, within a time limit.

        A collector that does not answer must not delay the end of the service.
        """
        thread = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(_LAST_EXPORT_LIMIT_S)
        if thread.is_alive():
            self._exporter.shutdown()

    def _to_sdk(self, span: Span) -> ReadableSpan:
        """Converts a span to the SDK's type. A tracer of the SDK would take six times as long."""
        return ReadableSpan(
            name=str(span.name),
            context=_sdk_context(span.context, is_remote=False),
            parent=_sdk_context(span.parent, is_remote=span.kind == "server") if span.parent else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                SdkEvent(str(event.name), event.attributes, self._clock.wall_ns(event.at_ns)) for event in span.events
            ],
            links=[SdkLink(_sdk_context(link.context, is_remote=False), link.attributes) for link in span.links],
            kind=_KINDS[span.kind],
            status=_ERROR if span.is_error else _OK,
            start_time=self._clock.wall_ns(span.started_ns),
            end_time=self._clock.wall_ns(span.ended_ns),
            instrumentation_scope=_SCOPE,
        )


class _Counting(SpanExporter):
    """Counts the spans that an exporter was given, by outcome."""

    def __init__(self, exporter: SpanExporter, meters: Meters) -> None:
        self._exporter = exporter
        self._exported: Counter = meters.counter(Metrics.SPANS, "exported")
        self._failed: Counter = meters.counter(Metrics.SPANS, "failed")
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            (self._exported if result is SpanExportResult.SUCCESS else self._failed).add(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _sdk_context(context: SpanContext, *, is_remote: bool) -> SdkContext:
    state = TraceState.from_header([context.tracestate]) if context.tracestate else _NO_STATE
    return SdkContext(context.trace_id, context.span_id, is_remote, _SAMPLED, state)
