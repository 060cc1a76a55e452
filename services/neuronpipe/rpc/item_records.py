"""What a stage's process notes of its items: how long each took, and a span for those of sampled requests."""

import time
from types import TracebackType
from typing import Any

from neuronpipe.core.attributes import attributes_of, priority_word
from neuronpipe.core.metrics import Histogram, Telemetry
from neuronpipe.core.telemetry import Attributes, Metrics
from neuronpipe.core.tracing import Span, enter_span, status_name


class ItemRecords:
    """Makes the records of one rpc's items."""

    def __init__(self, method: str, telemetry: Telemetry) -> None:
        self.method = method
        self.tracer = telemetry.tracer
        self.in_flight = 0
        self._meters = telemetry.meters
        self._by_status: dict[str, Histogram] = {}
        telemetry.meters.gauge(Metrics.ITEMS_IN_FLIGHT, lambda: self.in_flight, method)

    def one_more(self, item: Any) -> "ItemRecord":
        """A context manager around the work on an item."""
        return ItemRecord(self, item)

    def durations(self, status: str) -> Histogram:
        """The durations of items that ended with a status."""
        found = self._by_status.get(status)
        if found is None:
            found = self._by_status[status] = self._meters.histogram(Metrics.ITEM_DURATION, self.method, status)
        return found


class ItemRecord:
    """One item's record. Its `value` is what the stage returned."""

    __slots__ = ("_item", "_records", "_span", "_started_ns", "value")

    def __init__(self, records: ItemRecords, item: Any) -> None:
        self._records = records
        self._item = item
        self._span: Span | None = None
        self._started_ns = 0
        self.value: object = None

    def __enter__(self) -> "ItemRecord":
        records, context = self._records, self._item.context
        self._started_ns = time.monotonic_ns()
        records.in_flight += 1
        if parent := records.tracer.joined(context.traceparent, context.tracestate):
            self._span = span = Span(records.method, parent.child(), parent, self._started_ns, kind="server")
            context.traceparent = span.context.traceparent  # what the stage does is inside of this span
            enter_span(span)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ended_ns = time.monotonic_ns()
        records, item = self._records, self._item
        records.in_flight -= 1
        status = status_name(error)
        records.durations(status).record(ended_ns - self._started_ns, self._span.context if self._span else None)
        if span := self._span:
            span.ended_ns = ended_ns
            span.attributes |= {
                Attributes.RPC_SYSTEM: "grpc",
                Attributes.RPC_METHOD: records.method,
                Attributes.RPC_STATUS: status,
                Attributes.MODEL: item.model,
                Attributes.VERSION: item.version,
                Attributes.REQUEST_ID: item.context.request_id,
                Attributes.PRIORITY: priority_word(item.context.priority),
                **attributes_of(self.value),
            }
            if error:
                span.fail(error, ended_ns)
            records.tracer.record(span)
