"""platform/telemetry/start.py: the last traces, in a form that every collector reads."""

import base64
import copy
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from neuronpipe.core.tracing import Clock, Link, Span, SpanContext, SpanEvent
from neuronpipe.platform.telemetry.start import Json, TraceStore


def _store(max_traces: int = 10) -> TraceStore:
    return TraceStore(max_traces, "gateway", Clock())


def _span(name: str = "x", context: SpanContext | None = None) -> Span:
    return Span(name, context or SpanContext.new(is_sampled=True), None, 1_000, 2_000)


def _names(found: Json) -> list[str]:
    return [
        span["name"]
        for resource in found["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_a_traces_spans_are_found_with_the_batches_that_they_link_to() -> None:
    store, batch = _store(), _span("batch")
    compute = _span("compute")
    compute.links.append(Link(batch.context))
    for span in (_span("other"), batch, compute, _span("root", compute.context.child())):
        store.add(span)
    assert _names(store.find(compute.context.trace_id)) == ["compute", "root", "batch"]


def test_a_trace_that_is_not_kept_has_no_spans() -> None:
    assert _names(_store().find(1)) == []


def test_the_oldest_trace_makes_room() -> None:
    store, spans = _store(max_traces=3), [_span() for _ in range(5)]
    for span in spans:
        store.add(span)
    assert [len(_names(store.find(span.context.trace_id))) for span in spans] == [0, 0, 1, 1, 1]


def test_one_trace_cannot_fill_the_memory() -> None:
    store, context = _store(), SpanContext.new(is_sampled=True)
    for _ in range(5_000):
        store.add(_span(context=context.child()))
    assert len(_names(store.find(context.trace_id))) == 1024


def test_spans_are_valid_otlp_json() -> None:
    store = _store()
    context, parent = SpanContext.new(is_sampled=True), SpanContext.new(is_sampled=True)
    span = Span("x", context, parent, 1_000, 2_000, kind="server", is_error=True)
    span.attributes |= {"text": "a", "number": 3, "real": 0.5, "flag": True}
    span.events.append(SpanEvent("e", 1_500))
    span.links.append(Link(SpanContext.new(is_sampled=True), {"row": 1}))
    store.add(span)
    read = json_format.ParseDict(_with_base64_ids(store.find(span.context.trace_id)), TracesData())
    (found,) = read.resource_spans[0].scope_spans[0].spans
    assert int.from_bytes(found.trace_id) == span.context.trace_id
    assert found.end_time_unix_nano - found.start_time_unix_nano == 1_000
    kinds = {attribute.key: attribute.value.WhichOneof("value") for attribute in found.attributes}
    assert kinds == {"text": "string_value", "number": "int_value", "real": "double_value", "flag": "bool_value"}
    assert (found.kind, found.status.code) == (found.SPAN_KIND_SERVER, found.status.STATUS_CODE_ERROR)


def _with_base64_ids(json: Any) -> Any:
    """OTLP writes ids as hexadecimal digits where protobuf's JSON has Base64."""
    if isinstance(json, list):
        return [_with_base64_ids(item) for item in json]
    if not isinstance(json, dict):
        return copy.copy(json)
    is_id = {"traceId", "spanId", "parentSpanId"}
    return {
        key: base64.b64encode(bytes.fromhex(value)).decode() if key in is_id else _with_base64_ids(value)
        for key, value in json.items()
    }
