"""Exports metrics to a collector by OTLP, from a thread of its own."""

import threading
import time
from collections.abc import Iterator

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from neuronpipe.core.metrics import Family, Histogram, Meters

_SCOPE = InstrumentationScope("neuronpipe")
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_LAST_EXPORT_LIMIT_S = 3.0


class MetricExport:
    """Exports metrics at an interval, and a last time at the end."""

    def __init__(self, exporter: MetricExporter, resource: Resource, meters: Meters, interval_s: float) -> None:
        self._exporter = exporter
        self._resource, self._meters, self._interval_s = resource, meters, interval_s
        self._started_ns = time.time_ns()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports the last numbers, within a time limit."""
        self._is_ending.set()
        self._thread.join(_LAST_EXPORT_LIMIT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_ending.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        self._exporter.export(metrics_data(self._meters, self._resource, self._started_ns, time.time_ns()))


def metrics_data(meters: Meters, resource: Resource, started_ns: int, now_ns: int) -> MetricsData:
    """Returns everything recorded since `started_ns`, in the SDK's types."""
    metrics = [_metric(family, started_ns, now_ns) for family in meters.families()]
    scope = ScopeMetrics(_SCOPE, metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, started_ns: int, now_ns: int) -> Metric:
    instrument = family.instrument
    data: HistogramData | Sum | Gauge
    if instrument.kind == "histogram":
        data = HistogramData(list(_histograms(family, started_ns, now_ns)), _CUMULATIVE)
    elif instrument.kind == "counter":
        data = Sum(list(_numbers(family, started_ns, now_ns)), _CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(list(_numbers(family, started_ns, now_ns)))
    return Metric(instrument.name, instrument.text, instrument.unit, data)


def _numbers(family: Family, started_ns: int, now_ns: int) -> Iterator[NumberDataPoint]:
    for labels, series in family.series.items():
        attributes: dict[str, str] = dict(zip(family.instrument.labels, labels, strict=True))
        yield NumberDataPoint(attributes, started_ns, now_ns, family.number(series))


def _histograms(family: Family, started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    divisor = family.divisor
    for labels, series in family.series.items():
        assert isinstance(series, Histogram)  # noqa: S101
        counts = list(series.counts)
        yield HistogramDataPoint(
            attributes=dict(zip(family.instrument.labels, labels, strict=True)),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=series.total / divisor,
            bucket_counts=counts,
            explicit_bounds=[bound / divisor for bound in series.bounds],
            # Optional in OTLP; useless in cumulative metrics.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
            exemplars=[
                Exemplar(
                    {}, exemplar.value / divisor, exemplar.at_ns, exemplar.context.span_id, exemplar.context.trace_id
                )
                for exemplar in dict(series.exemplars).values()
            ],
        )
