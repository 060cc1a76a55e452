"""A receiver of OTLP/gRPC on Jaeger's port, which tells the spans of a trace as JSON on the port of Jaeger's page: GET
/TRACE_ID.
"""

import dataclasses
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.servers.collector import grpc_collector

_OTLP = "0.0.0.0:4317"
# Where the layer tls puts its files.
_TLS = Path("/tls")
_PAGE = ("0.0.0.0", 16686)


def main() -> None:
    """Receives until it is killed."""
    with grpc_collector(_OTLP, _TLS if _TLS.exists() else None) as collector:

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                spans = [dataclasses.asdict(span) for span in collector.trace(self.path.strip("/"))]
                for span in spans:
                    span["links"] = [list(key) for key in span["links"]]
                body = json.dumps(spans).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        ThreadingHTTPServer(_PAGE, Handler).serve_forever()


if __name__ == "__main__":
    main()
