"""A process with an HTTP door, and the bytes that go through it."""

import json
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.processes import ServiceProcess

_LIMIT_S = 30
# Models of the tasks that the fake models of all tests lack.
_MODELS = {
    "reranker": ("BERT", "rerank"),
    "entailer": ("BERT", "zero_shot_classification"),
    "extractor": ("BERT", "feature_extraction"),
    "viewer": ("ViT", "image_classification"),
}


def make_http_repository(folder: Path, fake_repository: Path) -> None:
    """Fills a folder with a fake model of every task. Imports the compiler, which takes seconds, only when called."""
    from tests.models.architectures import make_source
    from tests.models.compiling import compile_model

    shutil.copytree(fake_repository, folder, dirs_exist_ok=True)
    for name, (architecture, task) in _MODELS.items():
        source = make_source(folder.with_name(f"http-source-{name}"), architecture, task)
        compile_model(source, folder, task, name=name, backend="fake")


@dataclass(frozen=True)
class HttpServer:
    """`address`: HOST:PORT of the HTTP door."""

    process: ServiceProcess
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self) -> "Connection":
        return Connection(self.address)


@contextmanager
def running_http_server(
    repository: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[HttpServer]:
    """Runs `serve all` with both doors."""
    given = ("--repository", str(repository), "--http-listen", "127.0.0.1:0", *options)
    with ServiceProcess("all", *given, environment=environment) as process:
        process.wait_until_ready()
        yield HttpServer(process, str(process.wait_for("listening for HTTP")["address"]))


@dataclass(frozen=True)
class RawResponse:
    """`head`: as it came, with lower-case names of headers. `version`: HTTP's."""

    version: str
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """Bytes to a server and back."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_LIMIT_S)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> RawResponse:
        """Returns the next answer. Raises EOFError if the server has ended the connection."""
        line = self._file.readline()
        if not line:
            raise EOFError
        version, status, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (field := self._file.readline().decode().strip()) != "":
            name, _, value = field.partition(":")
            headers[name.lower()] = value.strip()
        return RawResponse(version, int(status), headers, self._file.read(int(headers.get("content-length", "0"))))

    def is_ended(self) -> bool:
        """Returns whether the server ends the connection without another byte."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


def post(path: str, body: bytes, *fields: str, version: str = "1.1", media_type: str = "application/json") -> bytes:
    """Writes a request."""
    head = (f"POST {path} HTTP/{version}", "host: localhost", f"content-type: {media_type}")
    return "\r\n".join((*head, f"content-length: {len(body)}", *fields, "", "")).encode() + body
