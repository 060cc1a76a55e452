"""Keeps the last traces of a development server in memory, for `neuronpipe trace`, and writes them as OTLP JSON.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from neuronpipe.core.tracing import AttributeValue, Clock, Span, SpanContext

Json: TypeAlias = dict[str, Any]

_KINDS = {"internal": 1, "server": 2}
_ERROR = 2


def to_otlp_json(spans: Iterable[Span], resource: Mapping[str, AttributeValue], clock: Clock) -> Json:
    """The spans of one service as TracesData."""
    scope = {"scope": {"name": "neuronpipe"}, "spans": [_span(span, clock) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _span(span: Span, clock: Clock) -> Json:
    found: Json = {
        **_ids(span.context),
        "name": str(span.name),
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(clock.wall_ns(span.started_ns)),
        "endTimeUnixNano": str(clock.wall_ns(span.ended_ns)),
        "attributes": _attributes(span.attributes),
        "events": [
            {
                "name": str(one.name),
                "timeUnixNano": str(clock.wall_ns(one.at_ns)),
                "attributes": _attributes(one.attributes),
            }
            for one in span.events
        ],
        "links": [{**_ids(one.context), "attributes": _attributes(one.attributes)} for one in span.links],
        "status": {"code": _ERROR} if span.is_error else {},
    }
    if span.parent:
        found["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.context.tracestate:
        found["traceState"] = span.context.tracestate
    return found


def _ids(context: SpanContext) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[Json]:
    return [{"key": str(key), "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> Json:
    if isinstance(value, bool):  # before int: bool is a subclass of it
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


# Maximum for one trace. A trace has about ten, but a caller may send any number of requests in one.
_MAX_SPANS = 1024


class TraceStore:
    """Keeps a number of traces. The oldest is dropped when another one begins. A batch is a trace of its own."""

    def __init__(self, max_traces: int, service: str, clock: Clock) -> None:
        self._max_traces, self._service, self._clock = max_traces, service, clock
        self._traces: OrderedDict[int, list[Span]] = OrderedDict()

    def add(self, span: Span) -> None:
        """Keeps a span."""
        spans = self._traces.setdefault(span.context.trace_id, [])
        if len(spans) < _MAX_SPANS:
            spans.append(span)
        if len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)

    def find(self, trace_id: int) -> Json:
        """A trace's spans of this process and the batches that they ran in, as OTLP JSON; of an unknown trace none."""
        spans = list(self._traces.get(trace_id, ()))
        linked = dict.fromkeys(link.context.trace_id for span in spans for link in span.links)
        batches = [span for other in linked if other != trace_id for span in self._traces.get(other, ())]
        return to_otlp_json([*spans, *batches], {"service.name": self._service}, self._clock)
