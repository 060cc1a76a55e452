"""What tests need of S3: s3://bucket, and s3://secret, which nobody may read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


class _S3(BaseHTTPRequestHandler):
    """GET, HEAD, PUT and ListObjectsV2 of two buckets, without checking signatures."""

    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.objects[self._key()] = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            found = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(value)}</Size><ETag>1</ETag>"
                "<LastModified>2026-11-22T12:00:00.000Z</LastModified></Contents>"
                for key, value in sorted(self.objects.items())
                if key.startswith(prefix)
            )
            self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())
        elif self.path.startswith("/secret/"):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif self._key() in self.objects:
            self._answer(200, self.objects[self._key()])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (
            ("content-length", str(len(body))),
            ("etag", '"1"'),
            ("last-modified", "Sun, 22 Nov 2026 12:00:00 GMT"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The objects of s3://bucket by key; AWS's variables name the server meanwhile."""
    objects: dict[str, bytes] = {}
    handler = type("_Objects", (_S3,), {"objects": objects})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "eu-central-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield objects
        server.shutdown()
