"""rpc/client.py, and the command for containers: 0 where a server is serving, 1 where it is not."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neuronpipe import cli
from neuronpipe.core.errors import Unavailable
from neuronpipe.platform.tls import TlsFiles
from neuronpipe.rpc.client import check_health
from tests.servers.certificates import Authority, replace

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_INFERENCE = "neuronpipe.api.v1.InferenceService"
# Nothing listens on the discard port.
_NOWHERE = "127.0.0.1:9"


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def target(servicer: health.HealthServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_server_that_is_serving_passes(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _SERVING)
    check_health(target, "", 10)


def test_a_server_that_is_not_serving_is_unavailable(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _NOT_SERVING)
    with pytest.raises(Unavailable, match=f"^{target}: NOT_SERVING$"):
        check_health(target, "", 10)


def test_one_service_is_asked_for_by_its_name(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _SERVING)
    servicer.set("one.Service", _NOT_SERVING)
    with pytest.raises(Unavailable, match=r"^one\.Service: NOT_SERVING$"):
        check_health(target, "one.Service", 10)


def test_a_gateway_without_its_stages_is_not_healthy_though_its_process_is(
    servicer: health.HealthServicer, target: str
) -> None:
    servicer.set("", _SERVING)
    servicer.set(_INFERENCE, _NOT_SERVING)
    with pytest.raises(Unavailable, match=rf"^{_INFERENCE}: NOT_SERVING$"):
        check_health(target, None, 10)
    assert check_health(target, "", 10) == ""


def test_the_stages_that_a_gateway_does_not_reach_are_named(servicer: health.HealthServicer, target: str) -> None:
    servicer.set(_INFERENCE, _NOT_SERVING)
    for stage, status in (("tokenizer", _NOT_SERVING), ("neuron-executor", _SERVING), ("postprocessor", _NOT_SERVING)):
        servicer.set(stage, status)
    with pytest.raises(Unavailable, match=rf"^{_INFERENCE}: NOT_SERVING; it does not reach: tokenizer, postprocessor$"):
        check_health(target, None, 10)


def test_a_gateway_that_reaches_its_stages_is_healthy(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _SERVING)
    servicer.set(_INFERENCE, _SERVING)
    assert check_health(target, None, 10) == _INFERENCE


@pytest.mark.parametrize("service", ["TokenizerService", "NeuronExecutorService", "PostprocessorService"])
def test_a_stage_is_as_healthy_as_its_process(servicer: health.HealthServicer, target: str, service: str) -> None:
    servicer.set(f"neuronpipe.api.v1.{service}", _SERVING)
    servicer.set("", _NOT_SERVING)
    with pytest.raises(Unavailable, match=f"^{target}: NOT_SERVING$"):
        check_health(target, None, 10)
    servicer.set("", _SERVING)
    assert check_health(target, None, 10) == ""


def test_the_deadline_is_of_all_questions_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
        check_health(f"127.0.0.1:{silent.getsockname()[1]}", None, 0.2)


def test_a_service_that_the_server_does_not_have_is_unavailable(target: str) -> None:
    with pytest.raises(Unavailable, match=f"^{target} does not report its health: NOT_FOUND$"):
        check_health(target, "no.Service", 10)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=f"^{_NOWHERE} does not report its health: UNAVAILABLE: .*refused"):
        check_health(_NOWHERE, "", 10)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def encrypted(servicer: health.HealthServicer, authority: Authority) -> Iterator[str]:
    """The target of a healthy server that wants a client's certificate."""
    servicer.set("", _SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    issued = authority.issue()
    credentials = grpc.ssl_server_credentials([(issued.key, issued.certificate)], authority.certificate, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def _files(folder: Path, authority: Authority, client: Authority | None) -> TlsFiles:
    replace(folder / "ca.crt", authority.certificate)
    if client is None:
        return TlsFiles(ca=folder / "ca.crt")
    client.issue("caller").write(folder)
    return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


def test_a_caller_with_right_certificates_learns_health(encrypted: str, authority: Authority, tmp_path: Path) -> None:
    assert check_health(encrypted, "", 10, _files(tmp_path, authority, authority)) == ""


def test_a_server_of_another_authority_is_told_as_such(encrypted: str, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"UNAVAILABLE: .*CERTIFICATE_VERIFY_FAILED"):
        check_health(encrypted, "", 10, _files(tmp_path, Authority("another"), authority))


def test_a_missing_client_certificate_ends_as_grpc_says(encrypted: str, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"UNAVAILABLE: .*(Socket closed|Connection reset by peer)"):
        check_health(encrypted, "", 10, _files(tmp_path, authority, None))


def test_a_call_without_tls_at_a_port_with_tls_ends_with_what_grpc_says(encrypted: str) -> None:
    with pytest.raises(Unavailable, match=r"UNAVAILABLE: .*(Socket closed|Connection reset by peer)"):
        check_health(encrypted, "", 10)


def test_a_call_with_tls_at_a_port_without_is_told_as_such(target: str, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"UNAVAILABLE: .*WRONG_VERSION_NUMBER"):
        check_health(target, "", 10, _files(tmp_path, authority, None))


class _OldHttp(StreamRequestHandler):
    """A server of HTTP/1.1, which knows no preface of HTTP/2."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


def test_the_command_says_that_a_port_speaks_http(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), _OldHttp) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        target = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(SystemExit):
            cli.main(["health", "--target", target])
        server.shutdown()
        serving.join()
    assert f"--target {target} speaks HTTP/1.1; give the port of gRPC" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "found"), [((), _INFERENCE), (("--service", ""), "the process")])
def test_the_command_asks_for_what_callers_need_unless_told_else(
    servicer: health.HealthServicer,
    target: str,
    options: tuple[str, ...],
    found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer.set("", _SERVING)
    servicer.set(_INFERENCE, _SERVING)
    cli.main(["health", "--target", target, *options])
    assert capsys.readouterr().out == f"{target}: {found} is serving\n"


@pytest.mark.parametrize(("status", "code"), [(_SERVING, 0), (_NOT_SERVING, 1)])
def test_the_command_says_it_by_its_exit_code(
    servicer: health.HealthServicer, target: str, status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer.set("one.Service", status)
    try:
        cli.main(["health", "--target", target, "--service", "one.Service"])
        ended = 0
    except SystemExit as exit:
        ended = int(exit.code or 0)
    assert ended == code
    assert capsys.readouterr().err == ("" if code == 0 else "neuronpipe: UNAVAILABLE: one.Service: NOT_SERVING\n")
