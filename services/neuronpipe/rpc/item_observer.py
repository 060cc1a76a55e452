"""Records the durations of a stage's items, and spans for the items of sampled requests."""

import time
from types import TracebackType

from neuronpipe.core.attributes import attributes_of, priority_word
from neuronpipe.core.items import StageItem
from neuronpipe.core.metrics import Histogram, Telemetry
from neuronpipe.core.names import Attributes, Metrics
from neuronpipe.core.tracing import Span, SpanContext, enter_span, status_name


class ItemObserver:
    """Observes the items of one rpc."""

    def __init__(self, method: str, telemetry: Telemetry) -> None:
        self.method = method
        self.tracer = telemetry.tracer
        self.in_flight = 0
        self._meters = telemetry.meters
        self._by_status: dict[str, Histogram] = {}
        telemetry.meters.gauge(Metrics.ITEMS_IN_FLIGHT, lambda: self.in_flight, method)

    def observe(self, item: StageItem) -> "ItemObservation":
        """A context manager around the work on an item."""
        return ItemObservation(self, item)

    def durations(self, status: str) -> Histogram:
        """The durations of items that ended with a status."""
        found = self._by_status.get(status)
        if found is None:
            found = self._by_status[status] = self._meters.histogram(Metrics.ITEM_DURATION, self.method, status)
        return found


class ItemObservation:
    """The observation of one item. `value` is what the stage returned."""

    __slots__ = ("_item", "_observer", "_span", "_started_ns", "value")

    def __init__(self, observer: ItemObserver, item: StageItem) -> None:
        self._observer = observer
        self._item = item
        self._span: Span | None = None
        self._started_ns = 0
        self.value: object = None

    @property
    def trace(self) -> SpanContext | None:
        """The span to which the stage's work belongs.

        It is the one that was made here, or else the item's own, which is not sampled.
        """
        return self._span.context if self._span else self._item.call.trace

    def __enter__(self) -> "ItemObservation":
        observer, parent = self._observer, self._item.call.trace
        self._started_ns = time.monotonic_ns()
        observer.in_flight += 1
        if parent and parent.is_sampled and observer.tracer.is_on:  # the gateway has decided
            self._span = Span(observer.method, parent.child(), parent, self._started_ns, kind="server")
            enter_span(self._span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ns = time.monotonic_ns()
        observer, item = self._observer, self._item
        observer.in_flight -= 1
        status = status_name(error)
        observer.durations(status).record(ended_ns - self._started_ns, self._span.context if self._span else None)
        if span := self._span:
            span.ended_ns = ended_ns
            span.attributes |= {
                Attributes.RPC_SYSTEM: "grpc",
                Attributes.RPC_METHOD: observer.method,
                Attributes.RPC_STATUS: status,
                Attributes.MODEL: item.model.name,
                Attributes.VERSION: str(item.model.version),
                Attributes.REQUEST_ID: item.call.request_id,
                Attributes.PRIORITY: priority_word(item.call.priority),
                **attributes_of(self.value),
            }
            if error:
                span.fail(error, ended_ns)
            observer.tracer.record(span)
