"""Converts spans to OTLP JSON, which Jaeger's page and collectors read.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

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
