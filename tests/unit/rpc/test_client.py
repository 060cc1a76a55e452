"""rpc/client.py: what a failed call means, keys and certificates that a client shows, and the check of health, which
ends the command for containers with 0 where a server is serving and with 1 where it is not.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neuronpipe import cli
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    NeuronpipeError,
    NotConfigured,
    Overloaded,
    SetupError,
    Unavailable,
)
from neuronpipe.core.status import to_status
from neuronpipe.platform.tls import ServerTls, TlsFiles
from neuronpipe.rpc import client as rpc_client
from neuronpipe.rpc.client import ServiceConnection, check_health, error_of, key_metadata
from tests.servers.certificates import Authority, peer_names, replace, server_credentials
from tests.suite.waiting import happens
from tests.unit.every_error import EVERY_ERROR

_STATUS_WITH_DAMAGED_DETAIL = Status(
    code=code_pb2.RESOURCE_EXHAUSTED,
    message="full",
    details=[AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff" * 9)],
).SerializeToString()


def _failure(code: grpc.StatusCode, message: str, *trailers: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_an_error_of_a_service_of_ours_is_that_error(error: NeuronpipeError) -> None:
    # gRPC's own code and text are others on purpose: what the service sent counts.
    details = ("grpc-status-details-bin", to_status(error).SerializeToString())
    back = error_of(_failure(grpc.StatusCode.UNKNOWN, "a proxy's text", ("x-other", "1"), details))
    assert (type(back), vars(back)) == (type(error), vars(error))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, NotConfigured),  # a server of an earlier version
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_failure_that_grpc_found_is_the_error_of_its_code(code: grpc.StatusCode, kind: type[NeuronpipeError]) -> None:
    error = error_of(_failure(code, "socket closed"))
    assert (type(error), error.message) == (kind, "socket closed")


@pytest.mark.parametrize("details", [b"\xff" * 9, _STATUS_WITH_DAMAGED_DETAIL], ids=["status", "detail"])
def test_damaged_details_leave_the_status(details: bytes) -> None:
    failure = _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ("grpc-status-details-bin", details))
    error = error_of(failure)
    assert (type(error), error.message) == (Overloaded, "full")


def test_a_call_that_the_server_cut_off_may_be_repeated() -> None:
    error = error_of(_failure(grpc.StatusCode.CANCELLED, "CANCELLED"))
    assert (type(error), error.message) == (Unavailable, "the server ended the call: it is overloaded, or stops")


def test_a_call_that_the_server_cut_off_at_its_deadline_came_too_late() -> None:
    failure = _failure(grpc.StatusCode.CANCELLED, "CANCELLED")
    assert type(error_of(failure, remaining_s=0.001)) is DeadlineExceeded
    assert type(error_of(failure, remaining_s=1.0)) is Unavailable


def test_a_failure_without_a_text_is_named_by_its_code() -> None:
    assert error_of(_failure(grpc.StatusCode.UNAVAILABLE, "")).message == "UNAVAILABLE"


def test_a_status_code_of_grpc_is_one_of_google_rpc() -> None:
    assert {code.value[0] for code in grpc.StatusCode} == set(code_pb2.Code.values())


@pytest.mark.parametrize(
    ("target", "is_encrypted", "warns"),
    [
        ("gateway.example:50050", False, True),
        ("dns:///gateway.example:50050", False, True),
        ("127.0.0.1:50050,10.0.0.1:50050", False, True),
        ("gateway.example:50050", True, False),
        ("127.0.0.1:50050", False, False),
        ("localhost", False, False),
        ("dns:///[::1]:50050", False, False),
        ("unix:/run/gateway.sock", False, False),
    ],
)
def test_a_key_in_plain_text_to_another_machine_is_warned_of(
    target: str, is_encrypted: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert key_metadata("np_key", target=target, is_encrypted=is_encrypted) == [("authorization", "Bearer np_key")]
    assert bool(caplog.records) is warns
    assert "np_key" not in str([vars(record) for record in caplog.records])


def test_nothing_is_warned_of_where_there_is_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not key_metadata("", target="gateway.example:50050", is_encrypted=False)
    assert not caplog.records


_AUTHORITY = Authority()
_LIMIT_S = 20


class _Server:
    """Tells callers their names, at once or when it is let."""

    def __init__(self, folder: Path) -> None:
        replace(folder / "ca.crt", _AUTHORITY.certificate)
        _AUTHORITY.issue().write(folder)
        self.target = ""
        self.waiting = 0
        self.may_answer = asyncio.Event()
        files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        self._server = grpc.aio.server()
        methods: dict[str, Any] = {"Tell": grpc.unary_unary_rpc_method_handler(self._tell)}
        methods["Wait"] = grpc.unary_unary_rpc_method_handler(self._wait)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
        port = self._server.add_secure_port("127.0.0.1:0", server_credentials(ServerTls(files)))
        self.target = f"127.0.0.1:{port}"
        self.start, self.stop = self._server.start, self._server.stop

    async def _tell(self, request: bytes, context: Any) -> bytes:
        return " ".join(peer_names(context)).encode()

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.waiting += 1
        await self.may_answer.wait()
        return await self._tell(request, context)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[_Server]:
    running = _Server(tmp_path)
    await running.start()
    yield running
    await running.stop(0)


class _Stubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.tell: Any = channel.unary_unary("/a.Service/Tell")
        self.wait: Any = channel.unary_unary("/a.Service/Wait")


@pytest_asyncio.fixture
async def connection(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServiceConnection[_Stubs]]:
    """A connection that looks at its files before each call."""
    monkeypatch.setattr(rpc_client, "LOOK_EVERY_S", 0)
    replace(tmp_path / "ca.crt", _AUTHORITY.certificate)
    _AUTHORITY.issue("first.example").write(tmp_path / "client")
    files = TlsFiles(tmp_path / "client" / "tls.crt", tmp_path / "client" / "tls.key", tmp_path / "ca.crt")
    opened = ServiceConnection(server.target, _Stubs, tls=files)
    yield opened
    await opened.close()


async def _tell(connection: ServiceConnection[_Stubs]) -> bytes:
    with connection.use() as stubs:
        names: bytes = await stubs.tell(b"", timeout=_LIMIT_S)
        return names


async def _wait(connection: ServiceConnection[_Stubs]) -> bytes:
    with connection.use() as stubs:
        names: bytes = await stubs.wait(b"", timeout=_LIMIT_S)
        return names


async def test_new_calls_show_the_new_certificate_and_old_ones_are_answered(
    server: _Server, connection: ServiceConnection[_Stubs], tmp_path: Path
) -> None:
    with connection.use() as stubs:
        first = stubs.channel
    old = asyncio.create_task(_wait(connection))
    await happens(lambda: server.waiting == 1)
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    assert await _tell(connection) == b"second.example"
    assert not old.done()
    server.may_answer.set()
    assert await old == b"first.example"
    await happens(lambda: first.get_state() == grpc.ChannelConnectivity.SHUTDOWN)


async def test_the_last_good_certificate_stays_in_use(connection: ServiceConnection[_Stubs], tmp_path: Path) -> None:
    assert await _tell(connection) == b"first.example"
    (tmp_path / "client" / "tls.key").write_bytes(_AUTHORITY.issue().key)
    assert await _tell(connection) == b"first.example"
    _AUTHORITY.issue("expired.example", days=(-2, -1)).write(tmp_path / "client")
    assert await _tell(connection) == b"first.example"
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    assert await _tell(connection) == b"second.example"


async def test_closing_ends_calls_that_are_left_from_an_older_certificate(
    server: _Server, connection: ServiceConnection[_Stubs], tmp_path: Path
) -> None:
    old = asyncio.create_task(_wait(connection))
    await happens(lambda: server.waiting == 1)
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    await _tell(connection)
    await connection.close()
    with pytest.raises(asyncio.CancelledError):
        await old


async def test_a_client_with_files_that_cannot_be_used_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        ServiceConnection("127.0.0.1:1", _Stubs, tls=TlsFiles(ca=tmp_path / "missing.crt"))


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
