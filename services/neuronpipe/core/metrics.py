"""Metrics as plain numbers, which exporters read.

Recording takes a quarter of a microsecond; an instrument of the OpenTelemetry SDK takes fifty times as long
(docs/decisions/0011), and a request records nine values. Only the event loop's thread records. Other threads read, and
may see a sum that is one record behind its count.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import time_ns
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.names import Instrument
from neuronpipe.core.tracing import SpanContext, Tracer

Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A request that a bucket counted. `at_ns`: since 1970."""

    value: float
    context: SpanContext
    at_ns: int


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """Counts values in buckets. `counts` has one element more than `bounds`, for values above the last bound."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0
        self.exemplars: dict[int, Exemplar] = {}

    def record(self, value: float, context: SpanContext | None = None) -> None:
        """Counts a value. `context`: the sampled span of the request."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if context:
            self.exemplars[bucket] = Exemplar(value, context, time_ns())


# Exporters call it in their threads.
Gauge: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Family:
    """An instrument, and its recorded series by the values of its labels."""

    instrument: Instrument
    series: dict[Labels, Counter | Histogram | Gauge]

    @property
    def divisor(self) -> float:
        return 1e9 if self.instrument.unit == "s" else 1.0

    def number(self, series: Counter | Histogram | Gauge) -> float:
        """Returns the number of a counter or gauge, for export."""
        if isinstance(series, Counter):
            return series.value / self.divisor
        assert not isinstance(series, Histogram)  # noqa: S101
        return series() / self.divisor


class Meters:
    """All metrics of a process."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._others: list[Callable[[Iterable[Family]], Iterable[Family]]] = []

    def counter(self, instrument: Instrument, *labels: str) -> Counter:
        """Returns the counter with these values of the instrument's labels."""
        series = self._series(instrument, labels)
        counter = series.get(labels) or series.setdefault(labels, Counter())
        assert isinstance(counter, Counter)  # noqa: S101
        return counter

    def histogram(self, instrument: Instrument, *labels: str) -> Histogram:
        """Returns the histogram with these values of the instrument's labels."""
        series = self._series(instrument, labels)
        histogram = series.get(labels) or series.setdefault(labels, Histogram(instrument.bounds))
        assert isinstance(histogram, Histogram)  # noqa: S101
        return histogram

    def gauge(self, instrument: Instrument, read: Gauge, *labels: str) -> None:
        """Adds a gauge whose number is read at export."""
        self._series(instrument, labels)[labels] = read

    def remove(self, instrument: Instrument, *labels: str) -> None:
        self._series(instrument, labels).pop(labels, None)

    def show(self, instrument: Instrument, values: Mapping[Labels, float]) -> None:
        """Replaces all gauges of an instrument at once. `values`: by the values of its labels."""
        series: dict[Labels, Counter | Histogram | Gauge] = {
            labels: partial(float, value) for labels, value in values.items()
        }
        if series:
            self._families[instrument.name] = Family(instrument, series)
        else:
            self._families.pop(instrument.name, None)

    def families(self) -> Iterator[Family]:
        """Returns everything recorded so far, for exporters."""
        own_families = list(self._families.values())
        families: Iterable[Family] = [Family(family.instrument, dict(family.series)) for family in own_families]
        for add in self._others:
            families = add(families)
        return iter(families)

    def include(self, add: Callable[[Iterable[Family]], Iterable[Family]]) -> None:
        """Lets `add` add the families of other processes of the same service to `families`, for exporters."""
        self._others.append(add)

    def _series(self, instrument: Instrument, labels: Labels) -> dict[Labels, Counter | Histogram | Gauge]:
        if len(labels) != len(instrument.labels):
            raise ValueError(f"{instrument.name} has the labels {', '.join(instrument.labels)}; got {labels}")
        name = instrument.name
        return (self._families.get(name) or self._families.setdefault(name, Family(instrument, {}))).series


class Traces(Protocol):
    """The traces that are kept in memory."""

    def find(self, trace_id: int) -> dict[str, Any]:
        """Returns a trace's spans in this process as OTLP JSON."""


WriteMetrics: TypeAlias = Callable[[str], tuple[bytes, str]]
# Whether a scraper with this header `authorization` may read the metrics.
MayRead: TypeAlias = Callable[[str], bool]


def all_may_read(authorization: str) -> bool:
    return True


class Telemetry:
    """The tracer, the metrics and the kept traces of a service.

    `write_metrics`: returns a page of the metrics, as bytes and media type, for the `accept` of an HTTP request.
    `metrics_port`: shows the metrics at a port of their own while a block runs. The defaults record no spans, and
    metrics that are not exported.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        meters: Meters | None = None,
        traces: Traces | None = None,
        write_metrics: WriteMetrics = lambda accept: (b"", "text/plain"),
        metrics_port: Callable[[MayRead], AbstractContextManager[None]] = lambda may_read: nullcontext(),
    ) -> None:
        self.tracer = tracer or Tracer()
        self.meters = meters or Meters()
        self.traces = traces
        self.write_metrics = write_metrics
        self.metrics_port = metrics_port
