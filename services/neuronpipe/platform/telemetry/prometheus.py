"""Serves metrics on a port, in Prometheus' text format or in OpenMetrics (with exemplars), and reads such pages."""

import contextlib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Family, Histogram, Meters
from neuronpipe.core.names import Instrument
from neuronpipe.platform.tls import ServerTls

# The limit of the handshake, the request and the answer together.
_CONNECTION_LIMIT_S = 30.0
# Maximum number of open connections, each in a thread; more are closed. A Prometheus sends one request every few
# seconds.
_MAX_CONNECTIONS = 32


def prometheus_name(instrument: Instrument) -> str:
    """Returns a metric's Prometheus name by OpenTelemetry's rules. On the page, counters also end in `_total`."""
    return instrument.name.replace(".", "_") + ("_seconds" if instrument.unit == "s" else "")


def series_names(instrument: Instrument) -> list[str]:
    """Returns the names of a metric's series on the page."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    return [prometheus_name(instrument) + suffix for suffix in suffixes[instrument.kind]]


class MeterCollector(Collector):
    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterable[Metric]:
        return map(_metric, self._meters.families())


class MetricsPort:
    """An HTTP server for Prometheus, in a thread."""

    def __init__(
        self,
        listen: str,
        meters: Meters,
        tls: ServerTls | None = None,
        may_read: Callable[[str], bool] = lambda authorization: True,
    ) -> None:
        """`may_read`: whether a scraper with this `authorization` may read the metrics. Raises SetupError for an
        address that cannot be listened on.
        """
        host, _, port = listen.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Port", (_Server,), {"address_family": family, "tls": tls})
        self._server: WSGIServer
        try:
            app = _guarded(make_wsgi_app(_registry(meters)), may_read)
            self._server = make_server(host.strip("[]"), int(port), app, kind, _Scrape)
        except OSError as error:
            raise SetupError(f"--metrics-listen: cannot listen on {listen}: {error.strerror}") from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def write_page(meters: Meters, accept: str) -> tuple[bytes, str]:
    """Returns the port's page for a scraper who accepts `accept`, and its media type."""
    encode, media_type = choose_encoder(accept)
    return encode(_registry(meters)), media_type


def _registry(meters: Meters) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MeterCollector(meters))
    return registry


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, so that a handshake holds up no other connection."""

    daemon_threads = True
    tls: ServerTls | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The open connections and their ends, oldest first.
        self._open: dict[socket.socket, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread, unless too many are open."""
        if len(self._open) >= _MAX_CONNECTIONS:
            request.close()
            return
        self._open[request] = time.monotonic() + _CONNECTION_LIMIT_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that has been answered, or has failed."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends the connections that take too long, which wakes up their threads. Called twice a second."""
        now_s = time.monotonic()
        for connection, ends_s in list(self._open.items()):
            if ends_s <= now_s:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, object]:
        """Returns the next connection, whose first read shakes hands."""
        connection, address = super().get_request()
        if self.tls:
            connection = self.tls.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs nothing: connections fail for reasons of their callers, such as a certificate that they do not trust."""


class _Scrape(WSGIRequestHandler):
    timeout = _CONNECTION_LIMIT_S  # the limit of each read

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing for a request."""


def _guarded(app: Any, may_read: Callable[[str], bool]) -> Any:
    """Wraps the WSGI application so that only permitted scrapers read it."""

    def answer(environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if may_read(environment.get("HTTP_AUTHORIZATION", "")):
            page: Iterable[bytes] = app(environment, start_response)
            return page
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return []

    return answer


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


_MAX_BYTES = 64 << 20
_TIMEOUT_S = 10.0


def scrape(
    url: str,
    instruments: Collection[Instrument],
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
) -> dict[tuple[str, ...], float]:
    """Returns the numbers of some metrics, by the metric's name, the suffix of the series, the values of its labels,
    and for the suffix _bucket the upper bound. Raises SetupError if the page is unreadable.
    """
    if not url.startswith(("http://", "https://")):
        raise SetupError(f"{url}: is not the address of a page of metrics, as in http://127.0.0.1:9464/metrics")
    request = urllib.request.Request(url, headers={"accept": "text/plain", **dict(headers)})  # noqa: S310 (see above)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=tls) as response:  # noqa: S310
            return read_page(response.read(_MAX_BYTES).decode(), instruments)
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            raise SetupError(f"{url}: answers {error.code} {error.reason}") from error
        raise SetupError(f"{url}: its metrics cannot be read ({getattr(error, 'reason', error)})") from error


def read_page(page: str, instruments: Collection[Instrument]) -> dict[tuple[str, ...], float]:
    """Reads a page of metrics; see scrape. Raises ValueError if the page has another format."""
    wanted = {name: instrument for instrument in instruments for name in series_names(instrument)}
    numbers: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not (instrument := wanted.get(sample.name)):
                continue
            suffix = sample.name.removeprefix(prometheus_name(instrument))
            labels = [sample.labels.get(label.replace(".", "_"), "") for label in instrument.labels]
            bound = [sample.labels["le"]] if suffix == "_bucket" else []
            numbers[instrument.name, suffix, *labels, *bound] = sample.value
    return numbers
