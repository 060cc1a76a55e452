"""platform/telemetry/prometheus.py: a page that Prometheus reads, in both of its formats."""

import contextlib
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.samples import Sample

from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics, instruments
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.telemetry import prometheus
from neuronpipe.platform.telemetry.prometheus import MetricsPort, series_names

_CONTEXT = SpanContext.new(is_sampled=True)


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    meters = Meters()
    histogram = meters.histogram(Metrics.STAGE_DURATION, "minilm", "1", "predict")
    histogram.record(200_000)
    histogram.record(700_000, _CONTEXT)
    meters.counter(Metrics.REQUEST_TOKENS, "minilm", "1").add(12)
    meters.gauge(Metrics.CORES, lambda: 2, "minilm", "1")
    port = MetricsPort("127.0.0.1:0", meters)
    yield port
    port.close()


def _page(port: MetricsPort, accept: str) -> str:
    request = urllib.request.Request(f"http://{port.address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as response:
        text: str = response.read().decode()
    return text


def _samples(port: MetricsPort) -> list[Sample]:
    families = read_openmetrics(_page(port, "application/openmetrics-text"))  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples]


def test_numbers_are_in_base_units_under_prometheus_names(port: MetricsPort) -> None:
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in _samples(port)}
    assert values["neuronpipe_stage_duration_seconds_sum", None] == pytest.approx(0.0009)
    assert values["neuronpipe_stage_duration_seconds_count", None] == 2
    # 0.2 ms and 0.7 ms: one up to 0.25 ms, both up to 1 ms.
    assert values["neuronpipe_stage_duration_seconds_bucket", "0.00025"] == 1
    assert values["neuronpipe_stage_duration_seconds_bucket", "0.001"] == 2
    assert values["neuronpipe_request_tokens_total", None] == 12
    assert values["neuronpipe_cores", None] == 2


def test_a_bucket_points_to_a_trace(port: MetricsPort) -> None:
    ((bound, exemplar),) = [(sample.labels["le"], sample.exemplar) for sample in _samples(port) if sample.exemplar]
    assert bound == "0.001"
    assert exemplar.value == pytest.approx(0.0007)
    assert exemplar.labels == {"trace_id": f"{_CONTEXT.trace_id:032x}", "span_id": f"{_CONTEXT.span_id:016x}"}


def test_the_older_format_is_served_as_well(port: MetricsPort) -> None:
    names = {sample.name for family in read_text(_page(port, "text/plain")) for sample in family.samples}
    assert set(series_names(Metrics.STAGE_DURATION)) <= names


def test_every_metric_can_be_shown() -> None:
    meters = Meters()
    for instrument in instruments():
        labels = ["x"] * len(instrument.labels)
        if instrument.kind == "histogram":
            meters.histogram(instrument, *labels).record(1)
        elif instrument.kind == "counter":
            meters.counter(instrument, *labels).add()
        else:
            meters.gauge(instrument, lambda: 1, *labels)
    port = MetricsPort("127.0.0.1:0", meters)
    try:
        names = {sample.name for sample in _samples(port)}
    finally:
        port.close()
    assert names == {name for instrument in instruments() for name in series_names(instrument)}


def test_a_port_that_is_taken_is_a_fault_of_the_settings() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"^--metrics-listen: cannot listen on {address}: Address already in use$"):
            MetricsPort(address, Meters())


def test_connections_that_say_nothing_are_limited_in_number_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_MAX_CONNECTIONS", 4)
    monkeypatch.setattr(prometheus, "_CONNECTION_LIMIT_S", 0.5)
    port = MetricsPort("127.0.0.1:0", Meters())
    host, _, number = port.address.rpartition(":")
    try:
        connections = [socket.create_connection((host, int(number)), timeout=20) for _ in range(4)]
        for connection in connections:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        with socket.create_connection((host, int(number)), timeout=20) as one_more:
            assert one_more.recv(1) == b""  # one too many
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # its time is over
            connection.close()
        page = ""
        for _ in range(200):  # a place is free a moment after its caller sees the end
            with contextlib.suppress(OSError):
                page = _page(port, "application/openmetrics-text")
                break
            time.sleep(0.05)
        assert "# EOF" in page
    finally:
        port.close()
