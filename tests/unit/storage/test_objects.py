"""Objects by URI, in files and in an S3 that this test serves."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neuronpipe.storage.objects import Storage, StorageError
from neuronpipe.storage.uris import ObjectUri, parse_below


class _Bucket(BaseHTTPRequestHandler):
    """GET and PUT of S3, without checking signatures."""

    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        if self.path.startswith("/secret/"):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.path in self.objects:
            self._answer(200, self.objects[self.path])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')
        self.send_header("last-modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """What the S3 holds, by path."""
    objects: dict[str, bytes] = {}
    handler = type("_Objects", (_Bucket,), {"objects": objects})
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


def test_an_object_of_s3_is_what_was_written(bucket: dict[str, bytes]) -> None:
    storage, uri = Storage(), ObjectUri.parse("s3://results/day/1.jsonl")
    storage.write(uri, b"one")
    assert bucket == {"/results/day/1.jsonl": b"one"}
    assert storage.read(uri, 3) == b"one"


def test_errors_of_s3_say_whether_trying_again_helps(bucket: dict[str, bytes]) -> None:
    bucket["/results/large"] = b"12345"
    storage = Storage()
    for text, problem in {
        "s3://results/none": "is not there",
        "s3://secret/key": "access is denied",
        "s3://results/large": "is larger than 4 bytes, the limit",
    }.items():
        with pytest.raises(StorageError, match=problem) as caught:
            storage.read(ObjectUri.parse(text), 4)
        assert caught.value.is_lasting


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    storage, uri = Storage(), ObjectUri.parse(f"file://{tmp_path}/new/out.jsonl")
    storage.write(uri, b"first")
    storage.write(uri, b"second")
    assert storage.read(uri, 6) == b"second"
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.jsonl"]


def test_a_file_that_is_missing_or_too_large_is_no_file_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"12345")
    storage = Storage()
    for name, problem in {"none": "is not there", "large": "4 bytes, the limit", "": "cannot be used"}.items():
        with pytest.raises(StorageError, match=problem) as caught:
            storage.read(ObjectUri.parse(f"file://{tmp_path}/{name}"), 4)
        assert caught.value.is_lasting


def test_an_output_into_what_is_no_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        Storage().write(ObjectUri.parse(f"file://{tmp_path}/file/out"), b"x")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://x/y", "must begin with s3:// or file://"),
        ("/etc/passwd", "must begin with"),
        ("file://host/x", "absolute path"),
        ("s3:///key", "name a bucket"),
        ("file:///data/../etc/passwd", r"no steps \. and \.\."),
        ("file:///data/%2e%2e/etc/passwd", r"no steps \. and \.\."),
        ("s3://b/k?versionId=1", "no \\?"),
        ("s3://other/a", "must be below s3://b/in/ or file:///data"),
        ("s3://b/inside", "must be below"),
        ("file:///database/x", "must be below"),
        ("s3://b/in/", "must be below"),
    ],
)
def test_a_uri_stays_where_it_may_point(text: str, problem: str) -> None:
    folders = [ObjectUri.parse("s3://b/in/"), ObjectUri.parse("file:///data")]
    with pytest.raises(ValueError, match=problem):
        parse_below(text, folders)


def test_what_is_below_a_folder_may_be_named() -> None:
    folders = [ObjectUri.parse("s3://b"), ObjectUri.parse("file:///data")]
    assert [str(parse_below(text, folders)) for text in ("s3://b/k/1", "file:///data/a%20b")] == [
        "s3://b/k/1",
        "file:///data/a b",
    ]
