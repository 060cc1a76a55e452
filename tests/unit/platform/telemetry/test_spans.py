"""platform/telemetry/spans.py: a queue that never makes a request wait, and never loses a span in silence."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.tracing import Clock, Link, Span, SpanContext, SpanEvent
from neuronpipe.platform.telemetry import spans
from neuronpipe.platform.telemetry.spans import SpanQueue
from tests.suite.waiting import until

_LIMIT = 100


class _Exporter(SpanExporter):
    """Does what a test says with each export."""

    def __init__(self, take: Callable[[], SpanExportResult]) -> None:
        self._take = take
        self.exported: list[ReadableSpan] = []
        self.is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._take()
        if result is SpanExportResult.SUCCESS:
            self.exported += spans
        return result

    def shutdown(self) -> None:
        self.is_shut_down.set()


def _queue(exporter: SpanExporter, monkeypatch: pytest.MonkeyPatch) -> tuple[SpanQueue, Callable[[str], float]]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    meters = Meters()
    return SpanQueue(
        exporter, Resource({}), Clock(), meters, _LIMIT
    ), lambda outcome: meters.counter(Metrics.SPANS, outcome).value


def _span(parent: SpanContext | None = None) -> Span:
    return Span("x", SpanContext.new(is_sampled=True), parent, 1_000, 3_000)


def test_all_spans_of_a_healthy_collector_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = _Exporter(lambda: SpanExportResult.SUCCESS)
    queue, count = _queue(exporter, monkeypatch)
    for number in range(10 * _LIMIT):
        queue.add(_span())
        if number % _LIMIT == _LIMIT - 1:  # no faster than the queue is emptied
            until(lambda expected=number + 1: len(exporter.exported) == expected)  # type: ignore[misc]
    queue.close()
    assert (count("exported"), count("failed"), count("dropped")) == (10 * _LIMIT, 0, 0)


def test_a_collector_that_does_not_answer_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def hang() -> SpanExportResult:
        is_over.wait()
        return SpanExportResult.SUCCESS

    queue, count = _queue(_Exporter(hang), monkeypatch)
    began_s = time.monotonic()
    for _ in range(20 * _LIMIT):
        queue.add(_span())
    # Two thousand spans; an export that waits for the collector would take for ever.
    assert time.monotonic() - began_s < 20
    # At most the queue's length waits, and as many are with the collector.
    assert 18 * _LIMIT <= count("dropped") <= 19 * _LIMIT
    is_over.set()
    queue.close()
    assert count("dropped") + count("exported") == 20 * _LIMIT


@pytest.mark.parametrize("kind", ["refuses", "raises"])
def test_spans_that_a_collector_does_not_take_are_counted(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse() -> SpanExportResult:
        if kind == "raises":
            raise OSError("gone")
        return SpanExportResult.FAILURE

    queue, count = _queue(_Exporter(refuse), monkeypatch)
    for _ in range(_LIMIT // 2):
        queue.add(_span())
    queue.close()
    assert (count("exported"), count("failed"), count("dropped")) == (0, _LIMIT // 2, 0)


def test_a_collector_that_hangs_does_not_keep_the_service_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_LAST_EXPORT_LIMIT_S", 0.2)
    is_over = threading.Event()
    exporter = _Exporter(lambda: SpanExportResult.SUCCESS if is_over.wait() else SpanExportResult.FAILURE)
    queue, _ = _queue(exporter, monkeypatch)
    queue.add(_span())
    began_s = time.monotonic()
    queue.close()
    assert time.monotonic() - began_s < 20
    assert exporter.is_shut_down.is_set()
    is_over.set()


def test_a_span_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = _Exporter(lambda: SpanExportResult.SUCCESS)
    queue, _ = _queue(exporter, monkeypatch)
    parent, linked = SpanContext.new(is_sampled=True), SpanContext.new(is_sampled=True)
    span = _span(parent)
    span.attributes |= {"a": 1, "b": True}
    span.events.append(SpanEvent("e", 2_000))
    span.links.append(Link(linked, {"row": 3}))
    span.is_error = True
    queue.add(span)
    queue.close()
    (found,) = exporter.exported
    assert found.context is not None
    assert found.parent is not None
    assert found.start_time is not None
    assert (found.context.trace_id, found.context.span_id) == (span.context.trace_id, span.context.span_id)
    assert found.parent.span_id == parent.span_id
    assert found.end_time == found.start_time + 2_000
    assert [(event.name, event.timestamp - found.start_time) for event in found.events] == [("e", 1_000)]
    expected = [(linked.span_id, {"row": 3})]
    assert [(link.context.span_id, dict(link.attributes or {})) for link in found.links] == expected
    assert dict(found.attributes or {}) == {"a": 1, "b": True}
    assert not found.status.is_ok
