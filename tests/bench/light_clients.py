"""Clients of a closed loop that cost the machine as little as Python allows: bytes out, bytes in, and no task and no
future for a call.

A gRPC call is sent as two frames, of which the first hardly ever changes; HPACK blocks of answers that were met before
are not decoded again. On one CPU this client makes five times as many calls as grpc.aio, so that a fast server, and not
its client, limits what is measured.
"""

import asyncio
import math
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import cast

import hpack

from tests.bench.callers import PAUSE_S

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# RFC 9113, section 6: length and type, flags, stream.
_FRAME = struct.Struct(">IBI")
_FRAME_BYTES = _FRAME.size
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED = 0x4, 0x8
_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 1, 3, 4
_CANCEL = (0x8).to_bytes(4, "big")
_FIRST_WINDOW_BYTES = 65_535
_MAX_FRAME_BYTES = 16_384
_OUR_WINDOW_BYTES = 1 << 30
_WINDOW_STEP_BYTES = 1 << 20
_PREFIX = struct.Struct(">BI")
_CALL_LIMIT_S = 30.0
_LAST_CHUNK = b"0\r\n\r\n"
# Timers of uvloop have whole milliseconds.
_TICK_S = 0.001


class Calls:
    """What the callers of a closed loop send next, and what came of it.

    `answered`: duration in seconds and answer of each call that ended between `began_s` and `ends_s`, which are times
    of time.perf_counter. `errors`: of those that failed in this time; `count` and `failed`: of all. Callers end at
    `ends_s`, and where there are no more requests. `failure`: of the last error.
    """

    def __init__(self, requests: Iterator[bytes], callers: int, began_s: float = 0.0, ends_s: float = math.inf) -> None:
        self.answered: list[tuple[float, bytes]] = []
        self.errors = 0
        self.count = 0
        self.failed = 0
        self.failure = ""
        self._requests = requests
        self._began_s, self._ends_s = began_s, ends_s
        self._callers = callers
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()

    def next(self) -> bytes | None:
        """A caller's next request; None where it shall end."""
        request = next(self._requests, None) if time.perf_counter() < self._ends_s else None
        if request is None:
            self._callers -= 1
            if not self._callers and not self.over.done():
                self.over.set_result(None)
        else:
            self.count += 1
        return request

    def answer(self, sent_s: float, data: bytes) -> None:
        """Notes an answer."""
        now_s = time.perf_counter()
        if self._began_s <= now_s <= self._ends_s:
            self.answered.append((now_s - sent_s, data))

    def error(self, failure: str) -> None:
        """Notes a call that failed."""
        self.failure = failure
        self.failed += 1
        self.errors += self._began_s <= time.perf_counter() <= self._ends_s

    def break_off(self, reason: str) -> None:
        """Ends the loop: there is no connection any more."""
        if not self.over.done():
            self.over.set_exception(ConnectionError(f"{reason}; the last failed call: {self.failure or 'none'}"))


class GrpcConnection(asyncio.Protocol):
    """All callers of unary calls of one method, on one connection; or calls from outside, with `call`."""

    def __init__(
        self, calls: Calls, callers: int, authority: str, path: str, scheme: str, limit_s: float = _CALL_LIMIT_S
    ) -> None:
        self._calls, self._callers, self._limit_s = calls, callers, limit_s
        self._loop = asyncio.get_running_loop()
        headers = (
            *((":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "neuronpipe-bench")),
            ("grpc-timeout", f"{limit_s * 1e3:.0f}m"),
        )
        encoder = hpack.Encoder()
        # The server has all of them in its table once the first has come.
        self._first_block, self._block = encoder.encode(headers), encoder.encode(headers)
        self._next_stream = 1
        self._sent_s: dict[int, float] = {}
        self._messages: dict[int, bytes] = {}
        self._out: list[bytes] = []
        self._rest = b""
        self._received = 0
        self._window = _FIRST_WINDOW_BYTES
        self._max_streams = math.inf
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._decoder = hpack.Decoder()
        self._statuses: dict[bytes, tuple[bytes, bytes]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._out.append(_PREFACE)
        self._frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _OUR_WINDOW_BYTES))
        self._frame(_WINDOW_UPDATE, 0, 0, (_OUR_WINDOW_BYTES - _FIRST_WINDOW_BYTES).to_bytes(4, "big"))
        for _ in range(self._callers):
            self._ask()
        self.flush()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._out += (_FRAME.pack(len(payload) << 8 | kind, flags, stream), payload)

    def flush(self) -> None:
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def _ask(self) -> None:
        request = self._calls.next()
        if request is not None:
            self.call(request, time.perf_counter())

    def call(self, request: bytes, sent_s: float) -> None:
        """Makes a call that counts from a time on; `flush` sends it."""
        if len(self._sent_s) >= self._max_streams:
            self._calls.error("the connection has no room for another call")
            return
        stream = self._next_stream
        self._next_stream += 2
        self._sent_s[stream] = sent_s
        self._frame(_HEADERS, _END_HEADERS, stream, self._block if stream > 1 else self._first_block)
        message = _PREFIX.pack(0, len(request)) + request
        if len(message) > _FIRST_WINDOW_BYTES:
            raise ValueError(f"a request of {len(request)} bytes is beyond the window of a stream")
        if self._waiting or len(message) > self._window:
            self._waiting.append((stream, message))
        else:
            self._send(stream, message)

    def cancel_until(self, sent_s: float) -> None:
        """Gives up the calls that count from this time or earlier."""
        while self._sent_s and (first := next(iter(self._sent_s.items())))[1] <= sent_s:
            self._sent_s.pop(first[0])
            self._messages.pop(first[0], None)
            self._frame(_RST_STREAM, 0, first[0], _CANCEL)

    def _send(self, stream: int, message: bytes) -> None:
        self._window -= len(message)
        end = len(message)
        for start in range(0, end, _MAX_FRAME_BYTES):
            after = start + _MAX_FRAME_BYTES
            self._frame(_DATA, _END_STREAM if after >= end else 0, stream, message[start:after])

    def _ask_soon(self) -> None:
        self._ask()
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _FRAME_BYTES:
            head, flags, stream = _FRAME.unpack_from(data, at)
            after = at + _FRAME_BYTES + (head >> 8)
            if after > end:
                break
            payload = data[at + _FRAME_BYTES : after]
            at, kind = after, head & 0xFF
            if kind == _DATA and not flags & _PADDED:
                self._received += len(payload)
                known = self._messages.get(stream)
                self._messages[stream] = known + payload if known else payload
            elif kind == _HEADERS and flags & _END_HEADERS and not flags & _PADDED:
                status, failure = self._status(payload)
                if flags & _END_STREAM:
                    self._end(stream, status == b"0", failure)
            else:
                self._control(kind, flags, stream, payload)
        self._rest = data[at:]
        if self._received > _WINDOW_STEP_BYTES:
            self._frame(_WINDOW_UPDATE, 0, 0, self._received.to_bytes(4, "big"))
            self._received = 0
        self.flush()

    def _status(self, block: bytes) -> tuple[bytes, bytes]:
        """gRPC's status of a block of headers, and its message.

        A block that puts nothing into the table of headers says the same until another one does.
        """
        known = self._statuses.get(block)
        if known is None:
            entries = self._decoder.header_table.dynamic_entries
            before = list(entries)
            fields = dict(self._decoder.decode(block, raw=True))
            known = fields.get(b"grpc-status", b""), fields.get(b"grpc-message", b"")
            if list(entries) != before:
                self._statuses.clear()
            else:
                self._statuses[block] = known
        return known

    def _end(self, stream: int, is_ok: bool, failure: bytes) -> None:
        message, sent_s = self._messages.pop(stream, b""), self._sent_s.pop(stream, None)
        if sent_s is None:  # it was given up
            return
        if is_ok and message:
            self._calls.answer(sent_s, message[_PREFIX.size :])
            self._ask()
        elif self._callers or time.perf_counter() - sent_s < self._limit_s:  # else the server gave it up first
            self._calls.error(failure.decode(errors="replace"))
            if self._callers:
                self._loop.call_later(PAUSE_S, self._ask_soon)

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            settings = dict(struct.iter_unpack(">HI", payload))
            if settings.get(_HEADER_TABLE_SIZE, 4096) < 4096 or settings.get(_INITIAL_WINDOW_SIZE, 65_535) < 65_535:
                self._break_off("the server's settings are smaller than this client's calls")
            self._max_streams = settings.get(_MAX_CONCURRENT_STREAMS, self._max_streams)
            self._frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(payload, "big")
            while self._waiting and len(self._waiting[0][1]) <= self._window:
                waiting, message = self._waiting.popleft()
                if waiting in self._sent_s:
                    self._send(waiting, message)
        elif kind == _RST_STREAM and stream in self._sent_s:
            self._end(stream, False, b"RST_STREAM")
        elif kind == _GOAWAY:
            self._break_off(f"the server ends the connection: {payload[8:].decode(errors='replace')}")
        elif kind in (_DATA, _HEADERS):
            self._break_off("the server sends padded frames, or CONTINUATION, which this client does not read")

    def _break_off(self, reason: str) -> None:
        self._calls.break_off(reason)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.break_off(f"connection lost: {exc}")


class HttpConnection(asyncio.Protocol):
    """One caller of POST with JSON over HTTP/1.1, on a connection that is kept."""

    def __init__(self, calls: Calls, authority: str, path: str) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\ncontent-length: ".encode()
        )
        self._data = b""
        self._body_at = self._end_at = 0
        self._is_chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        request = self._calls.next()
        if request is not None:
            self._sent_s = time.perf_counter()
            self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(request), request))

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        if not self._end_at:
            head, found, _ = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
            self._body_at = len(head) + 4
            self._is_chunked = length is None
            self._end_at = self._body_at + int(length.partition(b":")[2]) if length else len(self._data)
        # No JSON holds the end of chunks.
        if self._data.endswith(_LAST_CHUNK) if self._is_chunked else len(self._data) >= self._end_at:
            answer, is_ok = self._data, self._data.startswith(b"HTTP/1.1 200")
            body = answer[self._body_at :]
            self._data, self._end_at = b"", 0
            if is_ok:
                self._calls.answer(self._sent_s, b"".join(_chunks(body)) if self._is_chunked else body)
                self._ask()
            else:
                self._calls.error(answer.decode(errors="replace"))
                self._loop.call_later(PAUSE_S, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.break_off(f"connection lost: {exc}")


def _chunks(body: bytes) -> Iterator[bytes]:
    at = 0
    while not body.startswith(_LAST_CHUNK, at):
        size, _, _ = body[at : at + 20].partition(b"\r\n")
        begin = at + len(size) + 2
        at = begin + int(size, 16) + 2
        yield body[begin : at - 2]


async def run_grpc(calls: Calls, callers: int, target: str, path: str, ca: bytes) -> None:
    """Returns when all callers have ended. `ca`: the authority of the server's certificate; empty: no TLS. Raises
    ConnectionError.
    """
    host, _, port = target.rpartition(":")
    context = None
    if ca:
        context = ssl.create_default_context(cadata=ca.decode())
        context.set_alpn_protocols(["h2"])
    scheme = "https" if context else "http"
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: GrpcConnection(calls, callers, target, path, scheme), host, int(port), ssl=context
    )
    try:
        await calls.over
    finally:
        transport.abort()


async def run_arrivals(
    arrivals_s: Iterator[float], requests: Iterator[bytes], deadline_s: float, target: str, path: str
) -> tuple[Calls, list[float]]:
    """Calls at times from now on, each given up at its deadline: what came of them, and by how many seconds each was
    sent too late. Raises ConnectionError.
    """
    calls = Calls(iter(()), 0)
    host, _, port = target.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: GrpcConnection(calls, 0, target, path, "http", deadline_s), host, int(port)
    )
    began_s, lags_s = time.perf_counter(), list[float]()
    due_s = next(arrivals_s, None)
    ends_s = math.inf
    try:
        while not calls.over.done() and (now_s := time.perf_counter()) < ends_s:
            while due_s is not None and began_s + due_s <= now_s:
                lags_s.append(now_s - began_s - due_s)
                calls.count += 1
                connection.call(next(requests), began_s + due_s)
                due_s = next(arrivals_s, None)
            if due_s is None and ends_s == math.inf:
                ends_s = now_s + deadline_s + _TICK_S
            connection.cancel_until(now_s - deadline_s)
            connection.flush()
            await asyncio.sleep(_TICK_S)
        if calls.over.done():
            calls.over.result()
        calls.over.set_result(None)
    finally:
        transport.abort()
    return calls, lags_s


async def run_http(calls: Calls, callers: int, target: str, path: str) -> None:
    """Returns when all callers have ended. Raises ConnectionError."""
    host, _, port = target.rpartition(":")
    connect = asyncio.get_running_loop().create_connection
    transports = [
        (await connect(lambda: HttpConnection(calls, target, path), host, int(port)))[0] for _ in range(callers)
    ]
    try:
        await calls.over
    finally:
        for transport in transports:
            transport.abort()
