"""doors/http/door.py: the server's own limits, and its end."""

import asyncio
import gc
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.doors.http.connection import HttpConnection, HttpServer
from neuronpipe.doors.http.door import HttpDoor
from neuronpipe.doors.http.exchange import HttpHandler, HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.wire import Exchange
from neuronpipe.gateway.settings import HttpSettings
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import CALLERS_CONNECTION_AGE_S, ProcessSettings
from neuronpipe.platform.tls import ServerTls, TlsFiles
from tests.servers.certificates import Authority
from tests.suite.constants import with_constants
from tests.suite.waiting import happens

_WAIT = Route("GET", "/wait", "waits")
_TAKE = Route("POST", "/take", "takes a body", is_raw=True)
_SERVICE = "a.Service"
_GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
_GET_WAIT = b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n"
_HALF_BODY = b"POST /take HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\nabc"


def _door(address: str = "127.0.0.1:0", /, *, tls: ServerTls | None = None, **limits: Any) -> HttpDoor:
    fields: dict[str, Any] = {"max_message_bytes": 1 << 20, "max_connection_age_s": CALLERS_CONNECTION_AGE_S, **limits}
    process = with_constants(ProcessSettings, **fields)
    return HttpDoor(process, HttpSettings(http_listen=address), _SERVICE, tls, max_input_bytes=1 << 20)


@asynccontextmanager
async def _running(
    handlers: HttpHandlers, *, tls: ServerTls | None = None, **limits: Any
) -> AsyncIterator[tuple[HttpDoor, HealthBoard, int]]:
    """A door that is open, the health that it shows, and its port."""
    door = _door(tls=tls, **limits)
    health = HealthBoard(door.services)
    await door.listen(health, InFlight("all", 1 << 20, 1 << 22))
    health.open()
    door.open(handlers)
    try:
        yield door, health, door.port
    finally:
        await door.stop(0)


def _server(door: HttpDoor) -> HttpServer:
    assert door._server
    return door._server


@asynccontextmanager
async def _connected(
    port: int, sent: bytes = b"", **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of a caller who has sent this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _ask(port: int, request: bytes) -> bytes:
    """The answer's first line."""
    async with _connected(port, request) as (reader, _):
        return await reader.readline()


def _answering(body: bytes = b"{}", *, after_s: float = 0) -> HttpHandler:
    async def answer(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(after_s)
        return HttpResponse(body)

    return answer


async def _echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.body)


@pytest.mark.parametrize("path", [b"/health", b"/ping", b"/v2/health/ready"])
async def test_health_is_the_process_and_the_service(path: bytes) -> None:
    request = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path
    async with _running([]) as (_, health, port):
        assert await _ask(port, request) == b"HTTP/1.1 200 OK\r\n"
        health.set(_SERVICE, False)
        assert await _ask(port, request) == b"HTTP/1.1 503 Service Unavailable\r\n"
        health.set(_SERVICE, True)
        health.drain()
        assert await _ask(port, request) == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert await _ask(port, b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n") == b"HTTP/1.1 200 OK\r\n"


async def test_the_open_inference_protocols_health_has_a_body() -> None:
    """KServe's client reads it."""

    async def body_of(word: str, port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v2/health/{word} HTTP/1.0\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer.partition(b"\r\n\r\n")[2]

    async with _running([]) as (_, health, port):
        assert [await body_of(word, port) for word in ("live", "ready")] == [b'{"live":true}', b'{"ready":true}']
        health.drain()
        assert [await body_of(word, port) for word in ("live", "ready")] == [b'{"live":true}', b'{"ready":false}']


@pytest.mark.parametrize("part", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"])
async def test_a_head_that_does_not_arrive_ends_the_connection(part: bytes) -> None:
    async with _running([], max_handshake_s=0.1) as (_, _, port):
        assert await _ask(port, part) == b"HTTP/1.1 400 Bad Request\r\n"


@pytest.mark.parametrize(
    "part",
    [
        _HALF_BODY,
        b"POST /take HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n",
        b"POST /take HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"GET /health HTTP/1.1\r\nho",
    ],
    ids=["body", "no body", "chunks", "head"],
)
async def test_a_request_that_the_end_of_the_callers_side_cuts_is_refused(part: bytes) -> None:
    async with _running([(_TAKE, _echo)]) as (door, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(part)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.endswith(b"\r\n\r\nThe connection ended within the request.")
        writer.close()
        await happens(lambda: not _server(door).connections)


@pytest.mark.parametrize("leaves_half", [True, False])
async def test_a_caller_that_ends_its_side_has_left_and_its_work_ends(*, leaves_half: bool) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait(request: HttpRequest) -> HttpResponse:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()
        raise AssertionError

    async with _running([(_WAIT, wait)]) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_GET_WAIT)
        await has_begun.wait()
        if leaves_half:
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        await asyncio.wait_for(has_ended.wait(), 20)


async def test_a_connection_that_ends_between_requests_is_told_nothing() -> None:
    async with _running([]) as (_, _, port), _connected(port) as (reader, writer):
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 20) == b""


async def test_a_second_head_that_does_not_arrive_ends_the_connection() -> None:
    async with _running([], max_handshake_s=0.1) as (_, _, port), _connected(port, _GET_HEALTH) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /hea")
        assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"


async def test_a_head_that_does_not_arrive_behind_a_request_is_not_told_so_in_its_place() -> None:
    async def wait(request: HttpRequest) -> HttpResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with _running([(_WAIT, wait)], max_handshake_s=0.1) as (_, _, port):
        assert await _ask(port, _GET_WAIT + b"GET /hea") == b""


async def test_a_request_that_is_slow_to_answer_is_no_head_that_is_slow_to_come() -> None:
    after = _answering(after_s=0.4)  # four times the limit of a head
    async with _running([(_WAIT, after)], max_handshake_s=0.1) as (_, _, port):
        assert await _ask(port, _GET_WAIT) == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_a_request_that_asks_for_another_protocol_is_answered(protocol: str) -> None:
    head = f"POST /take HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: {protocol}\r\n"
    body = b"a" * 3000
    async with _running([(_TAKE, _echo)]) as (_, _, port), _connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(head.encode() + b"content-length: 3000\r\n\r\n" + body)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            assert (await reader.readuntil(body)).endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("closes", [True, False], ids=["a connection that closes", "a caller that sends no more"])
async def test_an_end_does_not_wait_for_ever_for_a_caller_that_reads_nothing(closes: bool) -> None:
    may_answer = asyncio.Event()

    async def wait(request: HttpRequest) -> HttpResponse:
        await may_answer.wait()
        return HttpResponse(b"a" * 60_000, "text/plain", is_compressible=False)  # too little to pause who writes it

    async with _running([(_WAIT, wait)], max_send_s=0.3) as (door, _, port):
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        await asyncio.to_thread(caller.connect, ("127.0.0.1", port))
        fields = b"connection: close\r\n" if closes else b""
        await asyncio.to_thread(caller.sendall, b"GET /wait HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
        connections = _server(door).connections
        await happens(lambda: bool(connections))
        (connection,) = connections
        transport: Any = connection.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        may_answer.set()
        if not closes:
            await happens(lambda: transport.get_write_buffer_size())
            caller.shutdown(socket.SHUT_WR)
        await happens(lambda: transport.is_closing())
        assert transport.get_write_buffer_size()
        await happens(lambda: not connections)
        caller.close()


async def test_a_caller_that_reads_late_is_not_taken_for_one_that_does_not_read() -> None:
    may_answer, answer = asyncio.Event(), b"a" * (1 << 20)

    async def wait(request: HttpRequest) -> HttpResponse:
        await may_answer.wait()
        return HttpResponse(answer, "text/plain", is_compressible=False)

    async with _running([(_WAIT, wait)]) as (door, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        writer.write(_GET_WAIT)
        await happens(lambda: bool(_server(door).connections))
        (connection,) = _server(door).connections
        assert isinstance(connection, HttpConnection)
        system_socket = connection.transport.get_extra_info("socket")
        system_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        may_answer.set()
        await happens(lambda: connection._claim is not None)
        assert connection._in_flight.unread._bytes
        await reader.readuntil(b"\r\n\r\n")
        system_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        assert await reader.readexactly(len(answer)) == answer
        await happens(lambda: connection._claim is None)
        assert not connection._in_flight.unread._bytes
        writer.close()


async def test_thousands_of_questions_for_another_protocol_behind_a_body_are_all_answered() -> None:
    question = b"GET /health HTTP/1.1\r\nhost:localhost\r\nupgrade:a\r\nconnection:upgrade\r\n\r\n"
    async with _running([(_TAKE, _answering(b""))]) as (_, _, port), _connected(port) as (reader, writer):
        body = b"a" * (156 << 10)  # so that what follows comes in the largest pieces
        head = b"POST /take HTTP/1.1\r\nhost:localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body + question * 1400)
        for _ in range(1401):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_caller_of_http_1_0_that_asks_for_another_protocol_sees_the_end_of_its_answer() -> None:
    async with _running([(_WAIT, _answering())]) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /wait HTTP/1.0\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"\r\n\r\n{}")
        writer.close()


async def test_a_stream_to_a_caller_of_http_1_0_ends_with_its_connection() -> None:
    """Without chunks and without an answer in between, which it does not know (RFC 9112, 6.1; RFC 9110, 10.1.1)."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"data: one\n\n"
        yield b"data: two\n\n"

    async def take(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"", "text/event-stream", stream=parts())

    async with _running([(_TAKE, take)]) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /take HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}")
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"data: one\n\ndata: two\n\n"


async def test_a_body_that_waits_to_be_asked_for_and_is_not_read_ends_its_connection() -> None:
    """What comes next may be that body, or a request of a caller who does not send it (RFC 9110, 10.1.1)."""
    awaited = b"GET /health HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 60\r\n\r\n"
    async with _running([]) as (_, _, port):
        answers = await _refused(port, awaited, _GET_WAIT)
    head, _, rest = answers.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head.split(b"\r\n")
    assert rest == b""


@pytest.mark.parametrize(("sent", "is_asked_for"), [((b"{}",), False), ((b"", b"{}"), True)])
async def test_a_body_is_asked_for_unless_it_has_come(sent: tuple[bytes, ...], is_asked_for: bool) -> None:
    head = b"POST /take HTTP/1.1\r\n" + _HOST + b"expect: 100-continue\r\ncontent-length: 2\r\nconnection: close\r\n"
    async with _running([(_TAKE, _echo)]) as (_, _, port):
        answers = await _refused(port, head + b"\r\n" + sent[0], *sent[1:])
    assert answers.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") == is_asked_for
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1
    assert answers.endswith(b"{}")


async def test_requests_behind_one_that_waits_stay_bytes_until_their_turn() -> None:
    may_answer = asyncio.Event()

    async def wait(request: HttpRequest) -> HttpResponse:
        await may_answer.wait()
        return HttpResponse(b"{}")

    async with _running([(_WAIT, wait)]) as (door, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /wait HTTP/1.1\r\nhost:localhost\r\n\r\n" * 5000)
        connections: Any = _server(door).connections
        await happens(lambda: any(connection.pipeline for connection in connections))
        assert [len(connection.pipeline) < 100 for connection in connections] == [True]
        # A head in pieces, of which some wait here: its time to come does not run on.
        await happens(
            lambda: (
                [bool(connection._input.waiting) and connection._awaited.name != "HEAD" for connection in connections]
                == [True]
            )
        )
        may_answer.set()
        for _ in range(5000):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b"\r\n\r\n{}")
        writer.close()


async def test_an_answer_that_cannot_be_written_is_a_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"{}", headers=[(b"a", b"b\r\nc: d")])

    async with _running([(_WAIT, answer)]) as (_, _, port):
        assert await _ask(port, _GET_WAIT) == b"HTTP/1.1 500 Internal Server Error\r\n"
    assert "a request over HTTP cannot be answered" in caplog.text


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not() -> None:
    after = _answering(after_s=0.4)  # twice the limit
    async with _running([(_WAIT, after)], max_connection_idle_s=0.2) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(_GET_WAIT)
            assert (await reader.readuntil(b"\r\n\r\n{}")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


@pytest.mark.parametrize("fields", [b"", b"content-length: 60000\r\n"], ids=["lines", "body"])
async def test_bytes_that_are_no_request_do_not_keep_an_idle_connection(fields: bytes) -> None:
    """Empty lines, and a body that was not read before its request was answered."""
    async with _running([], max_connection_idle_s=0.2) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(10):
            while not reader.at_eof():
                writer.write(b"\r\n")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.02)
        writer.close()


async def test_what_outlasts_the_grace_is_told_that_the_server_stops() -> None:
    began = asyncio.Event()

    async def wait(request: HttpRequest) -> HttpResponse:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with _running([(_WAIT, wait)]) as (door, _, port):
        asking = asyncio.create_task(_ask(port, _GET_WAIT))
        await began.wait()
        await door.stop(0)
        assert await asking == b"HTTP/1.1 503 Service Unavailable\r\n"


async def test_connections_are_refused_until_it_is_open() -> None:
    door = _door()
    health = HealthBoard(door.services)
    await door.listen(health, InFlight("all", 1 << 20, 1 << 22))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", door.port)
    door.open([])
    assert await _ask(door.port, _GET_HEALTH) == b"HTTP/1.1 503 Service Unavailable\r\n"
    await door.stop(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", door.port)


async def test_it_may_stop_before_it_listens_and_twice() -> None:
    door = _door()
    await door.stop(0)
    await door.listen(HealthBoard(door.services), InFlight("all", 1 << 20, 1 << 22))
    await door.stop(0)
    await door.stop(0)


@pytest.mark.parametrize("address", ["host.invalid:1", "192.0.2.1:80"])
async def test_an_address_that_cannot_be_used_is_named(address: str) -> None:
    door = _door(address)
    with pytest.raises(SetupError, match=f"^--http-listen: cannot listen on {address}: ."):
        await door.listen(HealthBoard(door.services), InFlight("all", 1 << 20, 1 << 22))


@pytest.mark.parametrize(("max_age_s", "is_ended"), [(0.0, False), (3600.0, False), (1e-9, True)])
async def test_a_connection_of_a_certain_age_ends_with_its_answer(max_age_s: float, is_ended: bool) -> None:
    async with _running([], max_connection_age_s=max_age_s) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_GET_HEALTH)
        head = await reader.readuntil(b"\r\n\r\n")
        assert (b"connection: close" in head) == is_ended
        writer.close()


async def _refused(port: int, *parts: bytes) -> bytes:
    """All that is answered to parts of a request that come one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


_HOST = b"host: localhost\r\n"
_LENGTH, _CODING = b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n"
_CHUNK = b"3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("version", "rest", "status"),
    [
        ("1.1", _HOST + b"transfer-encoding: gzip, chunked\r\n\r\n" + _CHUNK, 501),
        ("1.1", _HOST + b"transfer-encoding: gzip\r\n" + _CODING + b"\r\n" + _CHUNK, 501),
        ("1.1", _HOST + b"transfer-encoding: chunked, gzip\r\n\r\n" + _CHUNK, 400),
        ("1.1", _HOST + b"transfer-encoding: gzip\r\n\r\n" + _CHUNK, 400),
        ("1.1", _HOST + _CODING * 2 + b"\r\n" + _CHUNK, 400),
        ("1.0", _HOST + _CODING + b"\r\n" + _CHUNK, 400),
        ("1.1", _HOST + _LENGTH + _CODING + b"\r\n" + _CHUNK, 400),
        ("1.1", _HOST + _CODING + _LENGTH + b"\r\n" + _CHUNK, 400),
        ("1.1", _HOST + _LENGTH * 2 + b"\r\nabc", 400),
        ("1.1", _HOST + b"content-length: 3, 3\r\n\r\nabc", 400),
        ("1.1", _HOST + b"content-length: +3\r\n\r\nabc", 400),
        ("1.1", _HOST + b"content-length: 99999999999999999999\r\n\r\nabc", 400),
        ("1.1", _HOST + b"content-length : 3\r\n\r\nabc", 400),
        ("1.1", _HOST + b"a: b\r\n content-length: 3\r\n\r\nabc", 400),
        ("1.1", _HOST + b"a: b\ncontent-length: 3\r\n\r\nabc", 400),
        ("1.1", _HOST + b"a: b\rcontent-length: 3\r\n\r\nabc", 400),
        ("1.1", _HOST + _CODING + b"\r\n+3\r\nabc\r\n0\r\n\r\n", 400),
        ("1.1", _HOST + _CODING + b"\r\n0x3\r\nabc\r\n0\r\n\r\n", 400),
        ("1.1", _HOST + _CODING + b"\r\n3;a\nb\r\nabc\r\n0\r\n\r\n", 400),
        ("1.1", _HOST + _CODING + b"\r\n10000000000000000003\r\nabc\r\n0\r\n\r\n", 400),
        ("1.1", _HOST + _CODING + b"\r\n3\r\nabc\n0\r\n\r\n", 400),
        ("1.1", _HOST + _CODING + b"\r\n3\r\nabc\r\n0\r\ncontent-length: 3\r\n\r\n", 400),
        ("1.1", _HOST * 2 + _LENGTH + b"\r\nabc", 400),
        ("1.1", _LENGTH + b"\r\nabc", 400),
    ],
    ids=lambda value: value.decode("ascii", "replace") if isinstance(value, bytes) else "",
)
async def test_a_request_that_a_proxy_may_read_as_another_one_is_refused_and_the_last(
    version: str, rest: bytes, status: int
) -> None:
    """RFC 9112, 3.2, 5.1, 5.2, 6.1, 6.3 and 7.1."""
    async with _running([(_TAKE, _answering()), (_WAIT, _answering())]) as (_, _, port):
        answers = await _refused(port, b"POST /take HTTP/%s\r\n" % version.encode() + rest + _GET_WAIT)
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 %d " % status) == 1


@pytest.mark.parametrize("chunk", [b"3;a=b", b"0000000000000000000000003", b'3;a="b;\\""'])
async def test_extensions_and_zeros_of_a_chunk_mean_nothing(chunk: bytes) -> None:
    bodies: list[bytes] = []

    async def take(request: HttpRequest) -> HttpResponse:
        bodies.append(request.body)
        return HttpResponse(b"{}")

    async with _running([(_TAKE, take)]) as (_, _, port):
        request = b"POST /take HTTP/1.1\r\n" + _HOST + _CODING + b"\r\n" + chunk + b"\r\nabc\r\n0\r\n\r\n"
        assert await _ask(port, request) == b"HTTP/1.1 200 OK\r\n"
    assert bodies == [b"abc"]


@pytest.mark.parametrize("behind", [b"broken\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n"], ids=["syntax", "no host"])
@pytest.mark.parametrize("first", [1, 2])
async def test_a_request_before_a_bad_one_is_answered_and_the_bad_one_is_not(behind: bytes, first: int) -> None:
    async with _running([(_WAIT, _answering(after_s=0.1))], max_handshake_s=0.05) as (_, _, port):
        answers = await _refused(port, _GET_WAIT * first + behind, b"a" * 40_000, _GET_WAIT)
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 OK\r\n") == first
    assert answers.count(b"connection: close\r\n") == 1
    assert answers.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
async def test_another_version_of_http_is_refused(version: bytes) -> None:
    async with _running([]) as (_, _, port):
        expected = b"HTTP/1.1 505 HTTP Version Not Supported\r\n"
        assert await _ask(port, b"GET /health %s\r\nhost: localhost\r\n\r\n" % version) == expected


async def test_a_caller_of_http_2_is_told_that_this_is_http_1() -> None:
    async with _running([]) as (_, _, port):
        answer = await _refused(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
    assert answer.endswith(b"This port takes HTTP/1.1.")


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nx-request-id: a\x7fb\r\n\r\n", b"\x16\x03 nonsense\r\n\r\n"])
async def test_the_answer_to_a_request_that_cannot_be_parsed_has_a_new_request_id(head: bytes) -> None:
    async with _running([]) as (_, _, port):
        answers = [await _refused(port, head) for _ in range(2)]
    ids = [re.findall(rb"\r\nx-request-id: ([0-9a-f]{32})\r\n", answer) for answer in answers]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("host", [b"a b", b"a/b", b"a@b", b"a, b", b"a\\b", b"h\xc3\xb6st"])
async def test_a_host_that_is_none_is_refused(host: bytes) -> None:
    """RFC 9112, 3.2."""
    async with _running([]) as (_, _, port):
        assert await _ask(port, b"GET /health HTTP/1.1\r\nhost: %s\r\n\r\n" % host) == b"HTTP/1.1 400 Bad Request\r\n"


@pytest.mark.parametrize("host", [b"", b"localhost", b"a_b.c-d:80", b"[::1]", b"[fe80::1%25a]:8080", b"127.0.0.1:1"])
async def test_a_host_may_be_a_name_or_an_address_with_a_port(host: bytes) -> None:
    async with _running([]) as (_, _, port):
        assert await _ask(port, b"GET /health HTTP/1.1\r\nhost: %s\r\n\r\n" % host) == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/wait", 200),
        (b"http://LOCALHOST:8080/wait?a=//b", 200),
        (b"http://[::1]/wait", 200),
        (b"http://localhost", 404),
        (b"http://localhost?a", 404),
        (b"http://elsewhere/wait", 403),
        (b"http://elsewhere:80/wait", 403),
    ],
)
async def test_the_host_of_an_absolute_target_counts_instead_of_the_field(target: bytes, status: int) -> None:
    """RFC 9112, 3.2.2."""
    host = b"localhost" if status == 403 else b"elsewhere"
    async with _running([(_WAIT, _answering())]) as (_, _, port):
        answered = await _ask(port, b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (target, host))
    assert answered.startswith(b"HTTP/1.1 %d " % status)


async def test_a_fault_is_told_to_a_caller_who_asks_for_a_head_without_a_body() -> None:
    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"{}", headers=[(b"a", b"\n")])

    async with _running([(_WAIT, answer)]) as (_, _, port):
        answered = await _refused(port, b"HEAD /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 500 ")
    assert answered.endswith(b"\r\n\r\n")


async def test_handshakes_count_as_connections_until_they_are_over(tmp_path: Path) -> None:
    Authority().issue("localhost").write(tmp_path)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"))
    async with _running([], tls=tls, max_connections=2) as (door, _, port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await happens(lambda: len(_server(door).listener.handshakes) == 2)
        assert await _refused(port, b"\x16\x03") == b""
        assert len(_server(door).listener.handshakes) == 2
        silent[0][1].write(b"no TLS")
        await happens(lambda: len(_server(door).listener.handshakes) == 1)
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("sent", [b"GET /hea", _HALF_BODY, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET"])
async def test_a_caller_that_never_sends_the_rest_holds_the_end_up_for_a_moment(sent: bytes) -> None:
    async def take(request: HttpRequest) -> HttpResponse:
        raise AssertionError

    async with _running([(_TAKE, take)]) as (door, _, port), _connected(port, sent) as (reader, _):
        connections: Any = _server(door).connections
        await happens(lambda: any(connection._input.calls for connection in connections))
        await asyncio.sleep(0.05)
        _server(door).in_flight.refuse_arriving()
        began_s = time.monotonic()
        await door.stop(20)
        assert time.monotonic() - began_s < 4
        answer = await reader.read()
        assert (sent == _HALF_BODY) == answer.startswith(b"HTTP/1.1 503 ")


_LARGE = b"a: " + b"b" * 900 + b"\r\n"


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + _LARGE * 3, b"GET /health?" + b"a" * 3000 + b" HTTP/1.1\r\n"],
    ids=["fields", "path"],
)
async def test_a_head_that_is_too_large_is_refused_also_if_it_comes_at_once(head: bytes) -> None:
    async with _running([], max_header_bytes=2000) as (_, _, port):
        answer = await _refused(port, head + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"too large" in answer


_CHUNKED = b"POST /take HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "trailers",
    [[_LARGE * 3], [_LARGE] * 3, [b"a: " + b"b" * 900] + [b"b" * 900] * 3],
    ids=["at once", "by and by", "one without an end"],
)
async def test_trailers_are_limited_as_heads_are(trailers: list[bytes]) -> None:
    async with _running([], max_header_bytes=2000) as (_, _, port):
        answer = await _refused(port, _CHUNKED + b"2\r\n{}\r\n0\r\n", *trailers)
    assert b"200 OK" not in answer


async def test_chunks_whose_heads_come_with_the_data_before_are_no_trailers() -> None:
    """Each part ends right behind the head of a chunk."""
    async with _running([(_TAKE, _echo)], max_header_bytes=100) as (_, _, port), _connected(port) as (reader, writer):
        for part in (_CHUNKED, b"5\r\n", *[b"     \r\n5\r\n"] * 20, b"12345\r\n0\r\n\r\n"):
            writer.write(part)
            await asyncio.sleep(0.005)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_a_head_behind_a_body_in_the_same_bytes_has_the_limit_of_any_head() -> None:
    """The pieces of a body are as large as the largest head."""
    body = b"a" * (55 << 10)
    head = b"POST /take HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with _running([(_TAKE, _answering())]) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body + b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + _LARGE * 15 + b"\r\n")
        for answer in (b"{}", b""):
            assert (await reader.readuntil(b"\r\n\r\n" + answer)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_trailers_within_the_limit_are_taken_and_mean_nothing() -> None:
    async def take(request: HttpRequest) -> HttpResponse:
        assert b"a" not in request.headers
        return HttpResponse(b"{}")

    # Much larger than the limit of a head, and cut right before its end.
    body = b"%x\r\n%s\r\n" % (8000, b"[" + b" " * 7998 + b"]")
    async with _running([(_TAKE, take)], max_header_bytes=2000) as (_, _, port), _connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(_CHUNKED + body + b"0\r\n")
            await asyncio.sleep(0.02)
            writer.write(_LARGE + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(2)


async def test_what_has_ended_leaves_nothing_to_the_garbage_collector() -> None:
    wait = _answering(after_s=0.05)

    def left() -> int:
        return sum(type(instance) in (Exchange, HttpConnection) for instance in gc.get_objects())

    async with _running([(_WAIT, wait), (_TAKE, wait)]) as (_, _, port):
        gc.collect()
        gc.disable()
        try:
            before = left()
            request = _GET_WAIT
            assert await _ask(port, request) == b"HTTP/1.1 200 OK\r\n"
            for sent in (request, request[:5], _HALF_BODY, b"broken\r\n\r\n"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                await asyncio.sleep(0.02)
                assert left() > before
                writer.transport.abort()
            await happens(lambda: left() == before)
        finally:
            gc.enable()
