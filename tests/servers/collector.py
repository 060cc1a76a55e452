"""A real OTLP receiver, by gRPC and by HTTP, that keeps what it gets."""

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

Value: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class Received:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    started_ns: int
    ended_ns: int
    is_error: bool
    attributes: Mapping[str, Value]
    events: tuple[str, ...]
    # (trace id, span id) → the attributes of each link to it
    links: Mapping[tuple[str, str], list[Mapping[str, Value]]]

    @property
    def duration_ns(self) -> int:
        return self.ended_ns - self.started_ns

    @property
    def key(self) -> tuple[str, str]:
        return self.trace_id, self.span_id


@dataclass
class Collector:
    """Spans and metrics that arrived. `endpoint`: the value for OTEL_EXPORTER_OTLP_ENDPOINT."""

    endpoint: str
    spans: list[Received] = field(default_factory=list)
    # (service, metric) → its data points
    points: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_spans:
                service = str(_attributes(resource.resource.attributes)["service.name"])
                self.spans += [_received(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._arrived.notify_all()

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_metrics:
                service = str(_attributes(resource.resource.attributes)["service.name"])
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        data = getattr(metric, str(metric.WhichOneof("data")))
                        self.points[service, metric.name] = list(data.data_points)
            self._arrived.notify_all()

    def wait_until(self, is_there: Callable[["Collector"], bool], timeout_s: float = 30) -> None:
        """Blocks until enough arrived."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: is_there(self), timeout_s), (
                f"{len(self.spans)} spans, {sorted(self.points)}"
            )

    def trace(self, trace_id: str) -> list[Received]:
        """Returns a trace's spans, in the order in which they began."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.started_ns)


def _received(service: str, span: Any) -> Received:
    links: dict[tuple[str, str], list[Mapping[str, Value]]] = {}
    for link in span.links:
        links.setdefault((link.trace_id.hex(), link.span_id.hex()), []).append(_attributes(link.attributes))
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        started_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        links=links,
    )


def _attributes(attributes: Any) -> dict[str, Value]:
    found: list[KeyValue] = list(attributes)
    return {attribute.key: getattr(attribute.value, str(attribute.value.WhichOneof("value"))) for attribute in found}


@contextmanager
def grpc_collector(listen: str = "127.0.0.1:0", tls: Path | None = None) -> Iterator[Collector]:
    """Runs a receiver of OTLP/gRPC. `tls`: a folder with tls.crt, tls.key and ca.crt, for mTLS."""
    collector = Collector("")

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc, unused-ignore]
        def Export(self, request: Any, context: Any) -> Any:
            collector.take_spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc, unused-ignore]
        def Export(self, request: Any, context: Any) -> Any:
            collector.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]
    if tls:
        pair = ((tls / "tls.key").read_bytes(), (tls / "tls.crt").read_bytes())
        credentials = grpc.ssl_server_credentials([pair], (tls / "ca.crt").read_bytes(), require_client_auth=True)
        collector.endpoint = f"https://127.0.0.1:{server.add_secure_port(listen, credentials)}"
    else:
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(listen)}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


@contextmanager
def http_collector(tls: Path | None = None) -> Iterator[Collector]:
    """Runs a receiver of OTLP/HTTP. `tls`: as for `grpc_collector`."""
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.take_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            else:
                collector.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    collector.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
