"""TLS on every hop, between processes of their own: what is refused, and certificates that change under calls."""

import asyncio
import contextlib
import http.client as http_client
import json
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import AsyncClient, Client, TlsFiles
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.platform.tls import watched_tls
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.items import TOKENIZE
from tests.callers.metrics import series_of
from tests.callers.requests import classify
from tests.servers.certificates import Authority
from tests.servers.tls_files import STAGES, Deployment
from tests.suite.commands import run

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

# How long certificates are replaced under load; `make soak` takes a minute.
_ROTATION_S = float(os.environ.get("NEURONPIPE_ROTATION_S", "4"))
_CALLERS = 4


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def processes(deployment: Deployment, fake_repository: Path) -> Iterator[dict[str, ServiceProcess]]:
    """The four services with mTLS everywhere."""
    options = ("--metrics-listen", "127.0.0.1:0", "--kept-traces", "10")
    with four_processes(fake_repository, *options, environment=deployment.environment()) as started:
        yield started


def _command(*words: str, code: int = 0) -> str:
    result = run(*words)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


def _context(files: TlsFiles, *, shows_certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    if shows_certificate:
        context.load_cert_chain(files.certificate, files.key)
    return context


def test_a_request_passes_all_hops(deployment: Deployment, processes: dict[str, ServiceProcess]) -> None:
    with Client(processes["gateway"].target, tls=deployment.files()) as client:
        assert client.infer(classify("a fine day")).model == "classifier"


def test_every_command_takes_the_files(deployment: Deployment, processes: dict[str, ServiceProcess]) -> None:
    target = ["--target", processes["gateway"].target, *deployment.options()]
    request = ["--model", "classifier", "--json", json.dumps({"text_classification": {"text": "a fine day"}})]
    assert "is serving" in _command("health", *target)
    assert json.loads(_command("infer", *target, *request))["model"] == "classifier"
    assert "classifier" in _command("models", *target)
    assert "tokenizer" in _command("trace", *target, *request)
    load = ["--model", "classifier", "--duration", "0.5", "--warm-up", "0", "--processes", "2", "--concurrency", "2"]
    assert json.loads(_command("load", *target, *load, "--json", "-").partition("\n}")[0] + "}")["answers"] > 0


def test_health_of_a_stage_is_told_to_any_caller_with_a_certificate(
    deployment: Deployment, processes: dict[str, ServiceProcess]
) -> None:
    assert "is serving" in _command("health", "--target", processes["tokenizer"].target, *deployment.options())


@pytest.mark.parametrize("kind", ["plain", "no certificate", "other authority", "expired"])
@pytest.mark.parametrize("service", ["gateway", "tokenizer"])
def test_a_caller_that_proves_nothing_gets_no_answer(
    deployment: Deployment, processes: dict[str, ServiceProcess], service: str, kind: str
) -> None:
    files = deployment.files()
    issued = {
        "other authority": Authority("another").issue("a.example"),
        "expired": deployment.authority.issue("a.example", days=(-2, -1)),
    }.get(kind)
    credentials = grpc.ssl_channel_credentials(
        Path(files.ca).read_bytes(), *((issued.key, issued.certificate) if issued else ())
    )
    target = processes[service].target
    with (
        grpc.insecure_channel(target) if kind == "plain" else grpc.secure_channel(target, credentials) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_server_of_another_authority_gets_no_request(
    deployment: Deployment, processes: dict[str, ServiceProcess], tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(Authority("another").certificate)
    own = deployment.files()
    files = TlsFiles(own.certificate, own.key, tmp_path / "ca.crt")
    with (
        Client(processes["gateway"].target, tls=files, retries=False) as client,
        pytest.raises(Unavailable, match="certificate"),
    ):
        client.list_models()


def test_a_server_of_another_name_gets_no_request(
    deployment: Deployment, fake_repository: Path, tmp_path: Path
) -> None:
    deployment.authority.issue("other.example").write(tmp_path)
    environment = {
        "NEURONPIPE_ALL_TLS_CERTIFICATE": str(tmp_path / "tls.crt"),
        "NEURONPIPE_ALL_TLS_KEY": str(tmp_path / "tls.key"),
    }
    with ServiceProcess("all", "--repository", str(fake_repository), environment=environment) as process:
        files = TlsFiles(ca=deployment.files().ca)
        with (
            Client(process.target, tls=files, retries=False) as client,
            pytest.raises(Unavailable, match="Hostname Verification"),
        ):
            client.list_models()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_answers_allowed_peers_only(
    deployment: Deployment, processes: dict[str, ServiceProcess], stage: str
) -> None:
    """The caller has a certificate of the same authority, and its bytes are no message: they are not looked at."""
    path = {
        "tokenizer": TOKENIZE.path,
        "neuron-executor": "/neuronpipe.api.v1.NeuronExecutorService/Execute",
        "postprocessor": "/neuronpipe.api.v1.PostprocessorService/Postprocess",
    }[stage]

    async def ask(files: TlsFiles) -> grpc.StatusCode:
        async with open_channel(processes[stage].target, tls=watched_tls(files, "client").value) as channel:
            open_stream: Any = channel.stream_stream(path)
            call = open_stream()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()  # the stage's announcement
                await call.write(b"\xff")
            code: grpc.StatusCode = await call.code()
            return code

    assert await ask(deployment.files()) == grpc.StatusCode.PERMISSION_DENIED
    assert await ask(deployment.files("gateway")) == grpc.StatusCode.INVALID_ARGUMENT
    refusal = processes[stage].wait_for("a caller is not among the allowed peers")
    assert refusal["names"] == ["localhost", "127.0.0.1", "spiffe://tests/caller"]


def _shown(address: str, files: TlsFiles) -> int:
    """The number of the certificate that a port shows."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        _context(files).wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        certificate = secured.getpeercert(binary_form=True)
    assert certificate
    return x509.load_der_x509_certificate(certificate).serial_number


def test_http_and_metrics_ports_ask_for_certificates_and_show_the_current_one(
    tmp_path: Path, fake_repository: Path
) -> None:
    deployment = Deployment(tmp_path)
    options = ("--repository", str(fake_repository), "--http-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    with ServiceProcess("all", *options, environment=deployment.environment()) as process:
        process.wait_until_ready()
        http, metrics = (str(process.wait_for(event)["address"]) for event in ("listening for HTTP", "metrics"))
        files = deployment.files()
        kept = http_client.HTTPSConnection(http, context=_context(files))
        for url in (f"https://{http}/health", f"https://{metrics}/metrics"):
            with urllib.request.urlopen(url, context=_context(files)) as response:
                assert response.status == 200
            with pytest.raises(OSError, match=r"certificate|reset|EOF|closed"):
                urllib.request.urlopen(url, context=_context(files, shows_certificate=False)).read()
        expiry = 'neuronpipe_tls_certificate_expiry_seconds{neuronpipe_tls_side="server"}'
        assert series_of(process, _context(files))[expiry] == pytest.approx(time.time() + 30 * 86_400, abs=600)
        for number in range(2):
            kept.request("GET", "/health")  # over one connection, whatever changes
            assert kept.getresponse().read() == b""
            new = deployment.renew("all", days=(-1, 60 + number))
            process.wait_for("changed files are used", number + 1)
            assert [_shown(address, files) for address in (http, metrics, process.target)] == [new.number] * 3
        assert series_of(process, _context(files))[expiry] == pytest.approx(time.time() + 61 * 86_400, abs=600)
        kept.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["gateway", "--tls-certificate=a"], "give both files, or neither"),
        (["gateway", "--tls-client-ca=a"], "--tls-client-ca: needs --tls-certificate"),
        (["gateway", "--stage-tls-certificate=a", "--stage-tls-key=b"], "--stage-tls-certificate: needs --tls-ca"),
        (["tokenizer", "--allowed-peers=a"], "--allowed-peers: needs --tls-client-ca"),
        (["tokenizer", "--allowed-peers= ,"], "--allowed-peers: names no caller"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(fake_repository: Path, options: list[str], problem: str) -> None:
    arguments = [*options, "--repository", str(fake_repository), "--listen", "127.0.0.1:0"]
    assert problem in _command("serve", *arguments, code=2)


async def test_certificates_change_every_second_under_load_and_no_call_fails(
    tmp_path: Path, fake_repository: Path
) -> None:
    """Those of every service and of the callers; the tokenizer's and the callers' as Kubernetes does it, all files at
    once, so that also those who read them for the first time find a pair.
    """
    deployment = Deployment(tmp_path)
    failures: list[NeuronpipeError] = []
    answers = 0
    ends_s = time.monotonic() + _ROTATION_S

    async def call(client: AsyncClient) -> None:
        nonlocal answers
        while time.monotonic() < ends_s:
            try:
                await client.infer(classify("a fine day"))
                answers += 1
            except NeuronpipeError as error:
                failures.append(error)

    async def call_anew(target: str) -> None:
        while time.monotonic() < ends_s:
            async with AsyncClient(target, tls=deployment.files(), retries=False) as client:
                await asyncio.gather(*(client.infer(classify("a fine day")) for _ in range(3)))

    def rotate() -> int:
        rotations = 0
        while time.monotonic() < ends_s - 0.5:
            for name in ("gateway", "neuron-executor", "postprocessor"):
                deployment.renew(name)
            for name in ("tokenizer", "caller"):
                deployment.swap(name)
            rotations += 1
            time.sleep(1)
        return rotations

    with four_processes(fake_repository, environment=deployment.environment()) as processes:
        target = processes["gateway"].target
        ends_s = time.monotonic() + _ROTATION_S
        async with AsyncClient(target, tls=deployment.files(), retries=False) as client:
            rotating = asyncio.create_task(asyncio.to_thread(rotate))
            await asyncio.gather(*(call(client) for _ in range(_CALLERS)), call_anew(target))
            rotations = await rotating
        assert failures == []
        print(f"{answers} answers, {rotations} rotations of each certificate, no failure")
        for service, process in processes.items():
            taken = [line for line in process.events() if line["event"] == "changed files are used"]
            assert taken, service
        streams = [line for line in processes["gateway"].events() if line["event"] == "a stage's stream is open"]
        assert len(streams) >= 3 + (3 if rotations > 15 else 0)
