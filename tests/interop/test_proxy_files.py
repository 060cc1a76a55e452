"""deploy/proxies: each configuration, as it is but for addresses and certificates, serves gRPC, streams and HTTP by one
TLS port.
"""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import AsyncClient, Client, TlsFiles
from neuronpipe.core.errors import ModelNotFound, Unauthenticated
from neuronpipe.gateway.callers.keys import create_key
from tests.callers.requests import classify
from tests.interop.proxies import running
from tests.servers.ports import free_port
from tests.servers.tls_files import Deployment

pytestmark = [pytest.mark.local_only, pytest.mark.long]
_FOLDER = Path(__file__).parents[2] / "deploy" / "proxies"
_ENVOY = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error", "-c")


def _nginx(text: str, folder: Path) -> str:
    """Runs as any user: in the foreground, with its files in a folder of its own."""
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root; " if os.geteuid() == 0 else ""  # else its workers cannot write there
    head = f"{user}daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
    return head + text.replace("http {", f"http {{ access_log off; {paths}", 1)


class _Proxied:
    """The port of a proxy, with the keys of its callers."""

    def __init__(self, address: str, ca: Path, key: str) -> None:
        self.address, self.ca, self.key = address, ca, key

    def client(self, key: str) -> Client:
        """A client over gRPC."""
        return Client(self.address, tls=TlsFiles(ca=str(self.ca)), api_key=key, retries=False)

    def post(self, path: str, body: str) -> tuple[int, Any]:
        """The status and the body of an answer over HTTP."""
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        connection = http.client.HTTPSConnection(
            self.address, timeout=60, context=ssl.create_default_context(cafile=str(self.ca))
        )
        with contextlib.closing(connection):
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


@pytest.fixture(scope="module", params=["nginx.conf", "envoy.yaml"])
def proxied(
    request: pytest.FixtureRequest, fake_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Proxied]:
    name = Path(request.param).stem
    program = shutil.which(name, path="/usr/sbin:.venv-interop/bin") or shutil.which(name)
    if program is None:
        if request.config.getoption("every_client"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed; `make interop` installs it")
    folder = tmp_path_factory.mktemp(name)
    tls = Deployment(folder / "tls")
    files, keys, port = tls.files("gateway"), folder / "keys", free_port()
    key, http_port = create_key(keys, "test", "test"), free_port()
    options = ["--repository", str(fake_repository), "--api-keys", str(keys), "--http-listen", f"127.0.0.1:{http_port}"]
    with ServiceProcess("all", *options) as server:
        grpc = server.wait_until_ready().target.rpartition(":")[2]
        text = (_FOLDER / request.param).read_text()
        changes = {
            "gateway:50050": f"127.0.0.1:{grpc}",
            "gateway:8080": f"127.0.0.1:{http_port}",
            "listen 443": f"listen 127.0.0.1:{port}",
            "address: gateway, port_value: 50050": f"address: 127.0.0.1, port_value: {grpc}",
            "address: gateway, port_value: 8080": f"address: 127.0.0.1, port_value: {http_port}",
            "address: 0.0.0.0, port_value: 443": f"address: 127.0.0.1, port_value: {port}",
            f"/etc/{name}/tls/tls.crt": str(files.certificate),
            f"/etc/{name}/tls/tls.key": str(files.key),
        }
        for before, after in changes.items():
            text = text.replace(before, after)
        command = (program, *(_ENVOY if name == "envoy" else ("-c",)))
        text = text if name == "envoy" else _nginx(text, folder)
        with running(command, text, port, folder) as address:
            yield _Proxied(address, Path(str(files.ca)), key)


def test_a_call_over_grpc_is_answered(proxied: _Proxied) -> None:
    with proxied.client(proxied.key) as client:
        assert client.infer(classify("A fine day.")).result.text_classification.labels


async def test_each_answer_of_a_stream_comes_before_the_next_request(proxied: _Proxied) -> None:
    answered = asyncio.Event()

    async def requests() -> AsyncIterator[InferRequest]:
        for number in range(3):
            yield classify("A fine day.", request_id=str(number))
            await asyncio.wait_for(answered.wait(), 20)  # a proxy that collects answers keeps this one back
            answered.clear()

    seen = []
    async with AsyncClient(proxied.address, tls=TlsFiles(ca=str(proxied.ca)), api_key=proxied.key) as client:
        async for answer in client.infer_stream(requests(), timeout_s=60):
            seen.append(answer.request_id)
            answered.set()
    assert seen == ["0", "1", "2"]


def test_a_call_over_http_is_answered(proxied: _Proxied) -> None:
    status, answer = proxied.post("/models/classifier", json.dumps({"inputs": "A fine day."}))
    assert status == 200
    assert {"label", "score"} <= answer[0][0].keys()


def test_an_error_comes_through_as_the_gateway_says_it(proxied: _Proxied) -> None:
    with (
        proxied.client(proxied.key) as client,
        pytest.raises(ModelNotFound, match="nothing"),
    ):
        client.infer(classify("A fine day.", model="nothing"))
    with proxied.client("np_wrong") as client, pytest.raises(Unauthenticated, match="no valid API key"):
        client.infer(classify("A fine day."))


def test_a_body_of_seven_mebibytes_reaches_the_gateway(proxied: _Proxied) -> None:
    """Many proxies take one MiB at most by default."""
    status, answer = proxied.post("/models/classifier", " " * (7 << 20) + json.dumps({"inputs": "A fine day."}))
    assert (status, len(answer)) == (200, 1)
