"""Callers that mean harm: each costs the server a bounded time, and nobody else their answers."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import h2.errors
import h2.events
import httpx
import pytest

from neuronpipe.api.v1.inference_pb2 import InferStreamRequest
from neuronpipe.client import Client
from tests.callers.metrics import metric
from tests.callers.raw_http2 import RawHttp2, connect, is_ended
from tests.callers.requests import classify
from tests.servers.tls_files import Deployment
from tests.suite.constants import constants
from tests.suite.waiting import until
from tests.systems.http_server import HttpServer, running_http_server

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_INFER = "/neuronpipe.api.v1.InferenceService/Infer"
_INFER_STREAM = "/neuronpipe.api.v1.InferenceService/InferStream"
_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED = "3", "4", "8", "12"
# rpc/door.py
_MAX_WATCHES = 2048
_MAX_CONNECTIONS = 40
_MAX_HEADER_BYTES = 8192


@pytest.fixture(scope="module")
def server(fake_repository: Path) -> Iterator[HttpServer]:
    """Limits that are reached soon."""
    options = ("--max-connections", str(_MAX_CONNECTIONS), "--max-connection-idle-s", "3", "--default-models", "minilm")
    environment = constants(
        max_handshake_s=1, max_header_bytes=_MAX_HEADER_BYTES, max_receive_s=1, max_send_s=1, max_stream_idle_s=1
    )
    with running_http_server(fake_repository, *options, environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def tls_server(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    files = Deployment(tmp_path_factory.mktemp("tls")).files("all")
    options = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    with running_http_server(fake_repository, *options, environment=constants(max_handshake_s=1)) as server:
        yield server


@pytest.fixture(autouse=True)
def everybody_else_is_answered(server: HttpServer) -> Iterator[None]:
    yield
    with Client(server.process.target) as client:
        assert client.classify("classifier", "A fine day.")
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    until(lambda: _metric(server, "neuronpipe_request_in_flight") == 0)


def _metric(server: HttpServer, name: str, *labels: str) -> float:
    return metric(f"{server.url}/metrics", name, *labels)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("door", ["grpc", "http"])
@pytest.mark.parametrize(
    "part",
    [b"", _PREFACE[:8], _PREFACE, _PREFACE + b"\0\0\0\4\0\0\0\0\0"],
    ids=["nothing", "half", "preface", "settings without an acknowledgement"],
)
def test_a_connection_without_a_handshake_is_ended(server: HttpServer, door: str, part: bytes) -> None:
    with connect(server.process.target if door == "grpc" else server.address) as connection:
        connection.sendall(part)
        assert is_ended(connection)


@pytest.mark.parametrize("door", ["grpc", "http"])
@pytest.mark.parametrize(
    "part", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], ids=["nothing", "half a hello"]
)
def test_a_handshake_of_tls_that_hangs_is_ended(tls_server: HttpServer, door: str, part: bytes) -> None:
    with connect(tls_server.process.target if door == "grpc" else tls_server.address) as connection:
        connection.sendall(part)
        assert is_ended(connection)


def test_a_connection_without_calls_is_ended_also_if_it_answers_pings(server: HttpServer) -> None:
    with RawHttp2(server.process.target) as caller:
        events = caller.events(lambda event: False)
    assert any(isinstance(event, h2.events.ConnectionTerminated) for event in events)


def test_connections_beyond_the_limit_are_refused_and_the_others_go_on(server: HttpServer) -> None:
    with ExitStack() as stack:
        callers = [stack.enter_context(RawHttp2(server.process.target)) for _ in range(_MAX_CONNECTIONS)]
        streams = [caller.open_call(_WATCH) for caller in callers]
        for caller, stream in zip(callers, streams, strict=True):
            caller.send_message(stream, b"")
            assert caller.events(lambda event: isinstance(event, h2.events.DataReceived))
        assert _metric(server, "neuronpipe_connection_open", "grpc") == _MAX_CONNECTIONS
        with connect(server.process.target) as one_more:
            assert is_ended(one_more)
        stream = callers[0].open_call(_CHECK)
        callers[0].send_message(stream, b"")
        assert callers[0].status(stream) == "0"
    until(lambda: _metric(server, "neuronpipe_connection_open", "grpc") < _MAX_CONNECTIONS)


def test_callers_who_cannot_watch_health_are_answered_all_the_same(server: HttpServer) -> None:
    def connect_in_time(stack: ExitStack) -> RawHttp2:
        """Connects only now, and acknowledges the settings: a connection that waits is ended by limits of its own."""
        caller = stack.enter_context(RawHttp2(server.process.target))
        caller.events(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
        return caller

    with ExitStack() as stack:
        for _ in range(2):
            caller = connect_in_time(stack)
            for _ in range(_MAX_WATCHES // 2):
                caller.send_message(caller.open_call(_WATCH), b"")
            stream = caller.open_call(_CHECK)
            caller.send_message(stream, b"")
            assert caller.status(stream) == "0"
        late = connect_in_time(stack)
        stream = late.open_call(_WATCH)
        late.send_message(stream, b"")
        assert late.status(stream) == _UNIMPLEMENTED
        with Client(server.process.target) as client:
            assert client.classify("classifier", "A fine day.")


@pytest.mark.parametrize("part", [b"", b"\0\0\0\0\x20half"], ids=["nothing", "half"])
@pytest.mark.parametrize("path", [_INFER, _CHECK])
def test_a_call_whose_message_does_not_come_is_ended(server: HttpServer, path: str, part: bytes) -> None:
    ended = _metric(server, "neuronpipe_call_ended_total", "max_receive_s")
    with RawHttp2(server.process.target) as caller:
        stream = caller.open_call(path)
        caller.frames.send_data(stream, part)
        caller.flush()
        assert caller.status(stream) == _DEADLINE_EXCEEDED
    assert _metric(server, "neuronpipe_call_ended_total", "max_receive_s") > ended


def test_an_http_body_that_does_not_come_is_ended(server: HttpServer) -> None:
    with server.connect() as connection:
        connection.send(b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert connection.receive().status == 504


@pytest.mark.parametrize("requests", [0, 2])
def test_an_idle_stream_is_ended(server: HttpServer, requests: int) -> None:
    ended = _metric(server, "neuronpipe_call_ended_total", "max_stream_idle_s")
    with RawHttp2(server.process.target) as caller:
        stream = caller.open_call(_INFER_STREAM)
        for number in range(requests):
            message = InferStreamRequest(request=classify("a", request_id=str(number)))
            caller.send_message(stream, message.SerializeToString(), ends=False)
        assert caller.status(stream) == _DEADLINE_EXCEEDED
    assert _metric(server, "neuronpipe_call_ended_total", "max_stream_idle_s") > ended


@pytest.mark.parametrize("path", [_INFER, _INFER_STREAM, _CHECK])
def test_a_caller_that_does_not_read_loses_its_call_and_no_other_of_the_connection(
    server: HttpServer, path: str
) -> None:
    ended = _metric(server, "neuronpipe_call_ended_total", "max_send_s")
    connections = _metric(server, "neuronpipe_connection_ended_total", "grpc", "max_send_s")
    message = {
        _INFER: classify("A fine day.").SerializeToString(),
        _INFER_STREAM: InferStreamRequest(request=classify("a", request_id="1")).SerializeToString(),
        _CHECK: b"",
    }[path]
    with RawHttp2(server.process.target, window=0) as caller:
        stream = caller.open_call(path)
        caller.send_message(stream, message, ends=False)
        assert caller.status(stream) == "reset"
        check = caller.open_call(_CHECK)
        caller.frames.increment_flow_control_window(1 << 16, check)
        caller.send_message(check, b"")
        assert caller.status(check) == "0"
    assert _metric(server, "neuronpipe_call_ended_total", "max_send_s") > ended
    assert _metric(server, "neuronpipe_connection_ended_total", "grpc", "max_send_s") == connections


def test_a_caller_that_leaves_a_stream_unread_is_done(server: HttpServer) -> None:
    ended = _metric(server, "neuronpipe_call_ended_total", "max_send_s")
    message = InferStreamRequest(request=classify("a", request_id="1")).SerializeToString()
    with RawHttp2(server.process.target, window=0) as caller:
        stream = caller.open_call(_INFER_STREAM)
        caller.send_message(stream, message, ends=False)
        caller.events(lambda event: isinstance(event, h2.events.ResponseReceived))
        caller.frames.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        caller.flush()
        time.sleep(2)  # longer than max_send_s: there is no response any more that is late
        assert _metric(server, "neuronpipe_call_ended_total", "max_send_s") == ended


def test_an_http_caller_that_does_not_read_loses_its_connection(server: HttpServer) -> None:
    ended = _metric(server, "neuronpipe_connection_ended_total", "http", "max_send_s")
    asks = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(server.address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(asks * 400)  # answers of megabytes, more than the system's buffers hold
        until(lambda: _metric(server, "neuronpipe_connection_ended_total", "http", "max_send_s") > ended)


@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize(
    "fields",
    [[("x-large", "a" * 4 * _MAX_HEADER_BYTES)], [(f"x-{number}", "a") for number in range(3000)]],
    ids=["large", "many"],
)
def test_large_metadata_is_refused(server: HttpServer, fields: list[tuple[str, str]], acknowledges: bool) -> None:
    with RawHttp2(server.process.target) as caller:
        if acknowledges:  # gRPC's own limit counts from then on
            caller.events(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
        stream = caller.open_call(_CHECK, *fields)
        caller.send_message(stream, b"")
        assert caller.status(stream) in (_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED)


def test_metadata_within_the_limit_is_always_taken(server: HttpServer) -> None:
    with grpc.insecure_channel(server.process.target) as channel:
        check: Any = channel.unary_unary(_CHECK)
        for _ in range(20):
            check(b"", metadata=[("x-large", "a" * (_MAX_HEADER_BYTES - 1000))], timeout=60)


def test_a_large_http_head_is_refused(server: HttpServer) -> None:
    ended = _metric(server, "neuronpipe_connection_ended_total", "http", "max_header_bytes")
    with server.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nx: " + b"a" * 2 * _MAX_HEADER_BYTES)
        assert connection.receive().status == 400
        assert connection.is_ended()
    assert _metric(server, "neuronpipe_connection_ended_total", "http", "max_header_bytes") > ended
