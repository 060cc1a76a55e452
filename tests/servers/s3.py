"""A server of S3 for tests: s3://bucket, and s3://secret, which no client may read."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import md5
from html import escape, unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

_LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


class _S3(BaseHTTPRequestHandler):
    """GET with ranges, HEAD, PUT, ListObjectsV2 and DeleteObjects of two buckets, with conditions, without checking
    signatures.
    """

    objects: dict[str, bytes]
    written: dict[str, datetime]
    look_on: Callable[[str, str], None]
    writing: threading.Lock
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        self.look_on("PUT", self._key())
        with self.writing:
            present = self.objects.get(self._key())
            wanted = self.headers.get("if-match")
            if (self.headers.get("if-none-match") == "*" and present is not None) or (
                wanted and (present is None or wanted != _etag(present))
            ):
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            self.objects[self._key()] = data
            self.written[self._key()] = datetime.now(UTC)
        self._answer(200, etag=_etag(data))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", body)]
        for key in keys:
            self.look_on("DELETE", key)
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.look_on(self.command, self._key())
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        elif self.path.startswith("/secret/"):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif (data := self.objects.get(self._key())) is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("if-none-match") == _etag(data):
            self._answer(304, etag=_etag(data))
        elif asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self._answer(206, data[start:end], _etag(data), {"content-range": f"bytes {start}-{end - 1}/{len(data)}"})
        else:
            self._answer(200, data, _etag(data))

    def _list(self, prefix: str, delimiter: str) -> None:
        below = {key: value for key, value in sorted(self.objects.items()) if key.startswith(prefix)}
        inside = {key for key in below if delimiter and delimiter in key[len(prefix) :]}
        folders = sorted({prefix + key[len(prefix) :].split(delimiter)[0] + delimiter for key in inside})
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(value)}</Size><ETag>1</ETag>"
            f"<LastModified>{self.written.get(key, _LONG_AGO):%Y-%m-%dT%H:%M:%S.000Z}</LastModified></Contents>"
            for key, value in below.items()
            if key not in inside
        ) + "".join(f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in folders)
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _answer(
        self, status: int, body: bytes = b"", etag: str = '"1"', others: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "content-length": str(len(body)),
            "etag": etag,
            "last-modified": "Sun, 22 Nov 2026 12:00:00 GMT",
            **(others or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{md5(data).hexdigest()}"'


@contextmanager
def running_s3(
    monkeypatch: pytest.MonkeyPatch, look_on: Callable[[str, str], None] = lambda method, key: None
) -> Iterator[dict[str, bytes]]:
    """Yields the objects of s3://bucket by key. AWS's variables name the server meanwhile.

    `look_on`: gets the method and the key of each request; an error that it raises breaks the connection.
    """
    objects: dict[str, bytes] = {}
    fields = {"objects": objects, "written": {}, "look_on": staticmethod(look_on), "writing": threading.Lock()}
    handler = type("_Objects", (_S3,), fields)
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for name, value in s3_variables(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        try:
            yield objects
        finally:
            server.shutdown()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignores a connection that was broken on purpose."""


def s3_variables(endpoint: str) -> dict[str, str]:
    """Returns AWS's variables for a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu-central-1",
    }
