"""Metrics on a port, in Prometheus' text format or OpenMetrics, as the scraper asks. Only OpenMetrics has exemplars."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Family, Histogram, Meters
from neuronpipe.core.names import Instrument


def prometheus_name(instrument: Instrument) -> str:
    """A metric's Prometheus name by OpenTelemetry's rules. On the page, counters also end in `_total`."""
    return instrument.name.replace(".", "_") + ("_seconds" if instrument.unit == "s" else "")


def series_names(instrument: Instrument) -> list[str]:
    """The names of a metric's series on the page."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    return [prometheus_name(instrument) + suffix for suffix in suffixes[instrument.kind]]


class MeterCollector(Collector):
    """Collects the metrics for a scrape."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterable[Metric]:
        return map(_metric, self._meters.families())


class MetricsPort:
    """An HTTP server for Prometheus, in a thread."""

    def __init__(self, listen: str, meters: Meters) -> None:
        """Raises SetupError for an address that cannot be listened on."""
        registry = CollectorRegistry()
        registry.register(MeterCollector(meters))
        host, _, port = listen.rpartition(":")
        self._server: WSGIServer
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise SetupError(f"cannot listen on {listen} for metrics: {error.strerror}") from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _metric(family: Family) -> Metric:
    instrument = family.instrument
    name, text = prometheus_name(instrument), instrument.text
    labels = [label.replace(".", "_") for label in instrument.labels]
    if instrument.kind == "histogram":
        page = HistogramMetricFamily(name, text, labels=labels)
        for values, series in family.series.items():
            assert isinstance(series, Histogram)  # noqa: S101
            page.add_metric(values, list(_buckets(series, family.divisor)), series.total / family.divisor)
        return page
    kind = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
    numbers = kind(name, text, labels=labels)
    for values, series in family.series.items():
        numbers.add_metric(values, family.number(series))
    return numbers


def _buckets(series: Histogram, divisor: float) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    exemplars = dict(series.exemplars)
    bounds = [*(f"{bound / divisor:g}" for bound in series.bounds), "+Inf"]
    for index, (bound, count) in enumerate(zip(bounds, accumulate(list(series.counts)), strict=True)):
        exemplar = exemplars.get(index)
        if not exemplar:
            yield bound, count
            continue
        ids = {"trace_id": f"{exemplar.context.trace_id:032x}", "span_id": f"{exemplar.context.span_id:016x}"}
        yield bound, count, Exemplar(ids, exemplar.value / divisor, exemplar.at_ns / 1e9)
