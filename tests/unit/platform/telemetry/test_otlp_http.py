"""platform/telemetry/otlp_http.py: a collector cannot hold an export for long, and its answer takes little memory."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace.export import SpanExportResult

from neuronpipe.platform.telemetry.environment import read_environment
from neuronpipe.platform.telemetry.exporters import metric_exporter, span_exporter
from neuronpipe.platform.telemetry.otlp_http import bounded_session

_LIMIT_S = 0.5
# An export that the deadline does not end would take this long at least.
_PATIENCE_S = 5.0

Answer = Callable[[socket.socket], None]


@contextmanager
def _collector(answer: Answer) -> Iterator[str]:
    """A server that reads a request and lets `answer` write; each connection has a thread."""
    is_over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while not is_over.is_set():
                received = b""
                while b"\r\n\r\n" not in received:
                    part = connection.recv(65536)
                    if not part:
                        return
                    received += part
                head, _, body = received.partition(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")
                )
                while len(body) < length:
                    body += connection.recv(65536)
                answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        is_over.set()


def _drip(head: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        ends_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends_s:
            connection.sendall(b"x")
            time.sleep(_LIMIT_S / 10)

    return answer


def _endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    ends_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_s:
        connection.sendall(b"x" * 1_000_000)


def _good(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


_DRIPS = {
    "body of a known length": b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n",
    "body up to the end": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
    "headers": b"HTTP/1.1 200 OK\r\nx-header: ",
    "status": b"HTTP/1.1 2",
}


@pytest.fixture(params=["spans", "metrics"])
def export(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bool]:
    """Exports nothing to an endpoint; returns whether that succeeded."""

    def run(endpoint: str) -> bool:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TIMEOUT": str(_LIMIT_S),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        environment = read_environment(variables)
        if request.param == "spans":
            spans = span_exporter(environment)
            try:
                return spans.export([]) is SpanExportResult.SUCCESS
            finally:
                spans.shutdown()
        metrics = metric_exporter(environment)
        try:
            return metrics.export(MetricsData([])) is MetricExportResult.SUCCESS
        finally:
            metrics.shutdown()

    return run


@pytest.mark.parametrize("head", _DRIPS.values(), ids=_DRIPS)
def test_an_answer_that_drips_ends_at_the_deadline_with_a_line_in_the_log(
    export: Callable[[str], bool], head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    began_s = time.monotonic()
    with _collector(_drip(head)) as endpoint:
        assert not export(endpoint)
    assert time.monotonic() - began_s < _PATIENCE_S / 2
    assert "Failed to export" in caplog.text


def test_an_endless_answer_takes_little_memory(export: Callable[[str], bool], caplog: pytest.LogCaptureFixture) -> None:
    tracemalloc.start()
    try:
        with _collector(_endless) as endpoint:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert not export(endpoint)
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The collector of this test holds a megabyte itself.
    assert peak - before < 8_000_000
    assert "the collector's answer is longer than 65536 bytes" in caplog.text


def test_a_good_answer_is_a_success(export: Callable[[str], bool], caplog: pytest.LogCaptureFixture) -> None:
    with _collector(_good) as endpoint:
        assert export(endpoint)
    assert not caplog.records


def test_exports_share_a_connection() -> None:
    connections: set[int] = set()

    def answer(connection: socket.socket) -> None:
        connections.add(connection.fileno())
        _good(connection)

    with _collector(answer) as endpoint:
        exporter = OTLPSpanExporter(f"{endpoint}/v1/traces", session=bounded_session(), timeout=_LIMIT_S)
        assert [exporter.export([]) for _ in range(3)] == [SpanExportResult.SUCCESS] * 3
        exporter.shutdown()  # type: ignore[no-untyped-call]
    assert len(connections) == 1


def test_an_error_of_the_collector_keeps_its_text() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad\r\ncontent-length: 4\r\n\r\nwhy?")

    with _collector(refuse) as endpoint, bounded_session() as session:
        response = session.post(endpoint, data=b"x", timeout=_LIMIT_S)
    assert (response.status_code, response.text) == (400, "why?")


def test_a_credential_provider_of_opentelemetry_makes_the_sessions() -> None:
    name = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
    assert read_environment({name: "gcp"}).has_credential_provider
    assert not read_environment({}).has_credential_provider
