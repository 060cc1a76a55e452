"""transform/folders.py and files.py over S3: a bucket holds what a folder would."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.transform.files import find_inputs, open_input
from neuronpipe.transform.folders import Folder, open_folder, write_file
from neuronpipe.transform.manifest import DoneShard, Manifest


class _S3(BaseHTTPRequestHandler):
    """GET, HEAD, PUT and ListObjectsV2 of one bucket, without checking signatures."""

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


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """What s3://bucket holds."""
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


@pytest.fixture(params=["path", "bucket"])
def folder(request: pytest.FixtureRequest, bucket: dict[str, bytes], tmp_path: Path) -> Folder:
    return open_folder("s3://bucket/runs/a" if request.param == "bucket" else str(tmp_path / "runs" / "a"))


def _shard(number: int) -> DoneShard:
    return DoneShard(number, f"part-{number:05d}.jsonl", 4, "rows.jsonl", 0, 1, 0, 3, 0, 4)


def test_a_folder_has_what_was_completed_in_it(folder: Folder) -> None:
    with folder.locked():
        assert folder.read("_run.json") is None
        write_file(folder, "_run.json", b"{}")
        write_file(folder, "_shards/1", b"one")
        broken = folder.create("_shards/2")
        broken.file.write(b"two")
        broken.discard()
        assert folder.read("_run.json") == b"{}"
        assert folder.names("_shards") == ["_shards/1"]
        assert folder.sizes(["_run.json", "none"]) == {"_run.json": 2}


def test_a_shard_is_done_where_its_results_are_there(folder: Folder) -> None:
    manifest = Manifest(folder)
    with folder.locked():
        for number in (1, 0, 2):
            manifest.add(_shard(number))
        write_file(folder, "part-00000.jsonl", b"{}{}")
        write_file(folder, "part-00001.jsonl", b"{}")  # of another size than its line says
        assert manifest.done() == [_shard(0)]
        manifest.begin("a", {"task": "x"})
        manifest.begin("a", {"task": "x"})
        with pytest.raises(SetupError, match="differs in task"):
            manifest.begin("b", {"task": "y"})


def test_rows_are_read_from_a_bucket(bucket: dict[str, bytes]) -> None:
    bucket |= {"in/a.jsonl": b"{}\n", "in/b.jsonl": b"[]\n", "in/notes.txt": b"", "in/deep/c.jsonl": b""}
    assert find_inputs(["s3://bucket/in/[ab].jsonl"]) == ["s3://bucket/in/a.jsonl", "s3://bucket/in/b.jsonl"]
    assert find_inputs(["s3://bucket/in/b.jsonl"]) == ["s3://bucket/in/b.jsonl"]
    assert "s3://bucket/in/notes.txt" not in find_inputs(["s3://bucket/in/"])
    with open_input("s3://bucket/in/b.jsonl") as opened:
        assert opened.read() == b"[]\n"
    with pytest.raises(SetupError, match="no such file"):
        find_inputs(["s3://bucket/out/"])
    with pytest.raises(SetupError, match=r"s3://bucket/gone\.jsonl: is not there"):
        open_input("s3://bucket/gone.jsonl")
