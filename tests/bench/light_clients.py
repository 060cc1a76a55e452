"""Senders of the load generator that cost the machine as little as Python allows: bytes out, bytes in, and no task and
no future for a call.

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
from collections.abc import Callable
from typing import Self, cast

import hpack
import httptools

from neuronpipe.core.errors import DeadlineExceeded, Overloaded, Unavailable
from neuronpipe.measure.load.generator import OK, Recorder, Sender, Sending
from tests.interop import frames

# RFC 9113, section 6: length and type, flags, stream.
_FRAME = struct.Struct(">IBI")
_FRAME_BYTES = _FRAME.size
_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS = 1, 3
_CANCEL = (0x8).to_bytes(4, "big")
_FIRST_WINDOW_BYTES = 65_535
_MAX_FRAME_BYTES = 16_384
_OUR_WINDOW_BYTES = 1 << 30
_WINDOW_STEP_BYTES = 1 << 20
_PREFIX = struct.Struct(">BI")
# The time limit of a call without a deadline.
CALL_LIMIT_S = 30.0


class GrpcConnection(asyncio.Protocol):
    """Unary calls of one method, on one connection. Each is given up `limit_s` after it was due."""

    def __init__(self, authority: str, path: str, scheme: str, limit_s: float = CALL_LIMIT_S) -> None:
        self._limit_s = limit_s
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
        self._sent: dict[int, Sending] = {}
        self._messages: dict[int, bytes] = {}
        self._out: list[bytes] = []
        self._rest = b""
        self._received = 0
        self._window = _FIRST_WINDOW_BYTES
        self._max_streams = math.inf
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._decoder = hpack.Decoder()
        self._statuses: dict[bytes, tuple[bytes, bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        # The message of the last call that failed.
        self.failure = ""

    @classmethod
    async def open(cls, target: str, path: str, ca: bytes = b"", limit_s: float = CALL_LIMIT_S) -> Self:
        """Connects. `ca`: the authority of the server's certificate; empty: no TLS. Raises OSError."""
        host, _, port = target.rpartition(":")
        context = None
        if ca:
            context = ssl.create_default_context(cadata=ca.decode())
            context.set_alpn_protocols(["h2"])
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(target, path, "https" if ca else "http", limit_s), host, int(port), ssl=context
        )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._out.append(frames.PREFACE)
        self._frame(frames.SETTINGS, 0, 0, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, _OUR_WINDOW_BYTES))
        self._frame(frames.WINDOW_UPDATE, 0, 0, (_OUR_WINDOW_BYTES - _FIRST_WINDOW_BYTES).to_bytes(4, "big"))
        self.flush()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._out += (_FRAME.pack(len(payload) << 8 | kind, flags, stream), payload)

    def flush(self) -> None:
        """Sends the calls that were begun."""
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def send(self, request: bytes, sending: Sending) -> None:
        """Begins a call; `flush` sends it."""
        if self._transport.is_closing():
            sending.fail(ConnectionError(f"the connection is lost; the last failed call: {self.failure or 'none'}"))
            return
        if len(self._sent) >= self._max_streams:
            self._fail(sending, "the connection has no room for another call")
            return
        message = _PREFIX.pack(0, len(request)) + request
        if len(message) > _FIRST_WINDOW_BYTES:
            raise ValueError(f"a request of {len(request)} bytes is beyond the window of a stream")
        stream = self._next_stream
        self._next_stream += 2
        self._sent[stream] = sending
        if not self._timer:
            self._wait(sending)
        self._frame(frames.HEADERS, frames.END_HEADERS, stream, self._block if stream > 1 else self._first_block)
        if self._waiting or len(message) > self._window:
            self._waiting.append((stream, message))
        else:
            self._send(stream, message)

    async def close(self) -> None:
        """Closes the connection."""
        if self._timer:
            self._timer.cancel()
        self._sent.clear()
        self._transport.abort()

    def _wait(self, sending: Sending) -> None:
        """Looks for calls to give up as soon as this one is due to be."""
        left_s = sending.due_s + self._limit_s - time.monotonic()
        self._timer = self._loop.call_later(max(left_s, 0.001), self._give_up)

    def _give_up(self) -> None:
        self._timer, now_s = None, time.monotonic()
        while self._sent:
            stream, sending = next(iter(self._sent.items()))
            if sending.due_s + self._limit_s > now_s:
                self._wait(sending)
                break
            del self._sent[stream]
            self._messages.pop(stream, None)
            self._frame(frames.RST_STREAM, 0, stream, _CANCEL)
            sending.end(sending, DeadlineExceeded.reason, None)
        self.flush()

    def _send(self, stream: int, message: bytes) -> None:
        self._window -= len(message)
        end = len(message)
        for start in range(0, end, _MAX_FRAME_BYTES):
            after = start + _MAX_FRAME_BYTES
            self._frame(frames.DATA, frames.END_STREAM if after >= end else 0, stream, message[start:after])

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
            if kind == frames.DATA and not flags & frames.PADDED:
                self._received += len(payload)
                known = self._messages.get(stream)
                self._messages[stream] = known + payload if known else payload
            elif kind == frames.HEADERS and flags & frames.END_HEADERS and not flags & frames.PADDED:
                status, failure = self._status(payload)
                if flags & frames.END_STREAM:
                    self._end(stream, status == b"0", failure)
            else:
                self._control(kind, flags, stream, payload)
        self._rest = data[at:]
        if self._received > _WINDOW_STEP_BYTES:
            self._frame(frames.WINDOW_UPDATE, 0, 0, self._received.to_bytes(4, "big"))
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
        message, sending = self._messages.pop(stream, b""), self._sent.pop(stream, None)
        if sending is None:  # it was given up
            return
        if is_ok and message:
            sending.end(sending, OK, message[_PREFIX.size :])
        elif time.monotonic() - sending.due_s >= self._limit_s:  # the server gave it up first
            sending.end(sending, DeadlineExceeded.reason, None)
        else:
            self._fail(sending, failure.decode(errors="replace"))

    def _fail(self, sending: Sending, failure: str) -> None:
        self.failure = failure
        sending.end(sending, Overloaded.reason, None)

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.SETTINGS and not flags & frames.ACK:
            settings = dict(struct.iter_unpack(">HI", payload))
            if (
                settings.get(_HEADER_TABLE_SIZE, 4096) < 4096
                or settings.get(frames.INITIAL_WINDOW_SIZE, 65_535) < 65_535
            ):
                self._break_off("the server's settings are smaller than this client's calls")
            self._max_streams = settings.get(_MAX_CONCURRENT_STREAMS, self._max_streams)
            self._frame(frames.SETTINGS, frames.ACK, 0, b"")
        elif kind == frames.PING and not flags & frames.ACK:
            self._frame(frames.PING, frames.ACK, 0, payload)
        elif kind == frames.WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(payload, "big")
            while self._waiting and len(self._waiting[0][1]) <= self._window:
                waiting, message = self._waiting.popleft()
                if waiting in self._sent:
                    self._send(waiting, message)
        elif kind == frames.RST_STREAM and stream in self._sent:
            self._end(stream, False, b"RST_STREAM")
        elif kind == frames.GOAWAY:
            self._break_off(f"the server ends the connection: {payload[8:].decode(errors='replace')}")
        elif kind in (frames.DATA, frames.HEADERS):
            self._break_off("the server sends padded frames, or CONTINUATION, which this client does not read")

    def _break_off(self, reason: str) -> None:
        for sending in self._sent.values():
            sending.fail(ConnectionError(f"{reason}; the last failed call: {self.failure or 'none'}"))
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._break_off(f"connection lost: {exc}")


class HttpSender(Sender):
    """POST with JSON over HTTP/1.1: each caller has a connection, which is kept until the server closes it."""

    def __init__(self) -> None:
        self._connections: list[_HttpConnection] = []
        self._idle: list[_HttpConnection] = []
        # The last answer with another status than 200.
        self.failure = ""

    @classmethod
    async def open(cls, target: str, path: str, callers: int) -> Self:
        """Connects each of the callers. Raises OSError."""
        host, _, port = target.rpartition(":")
        sender, connect = cls(), asyncio.get_running_loop().create_connection
        for _ in range(callers):
            _, connection = await connect(lambda: _HttpConnection(target, path, sender.end), host, int(port))
            sender._connections.append(connection)
        sender._idle += sender._connections
        return sender

    def send(self, request: bytes, sending: Sending) -> None:
        """Sends a request."""
        self._idle.pop().send(request, sending)

    async def call(self, request: bytes) -> bytes:
        """Sends a request by itself, and returns the answer. Raises ConnectionError with an answer that is an error."""
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def end(sending: Sending, outcome: str, answer: bytes) -> None:
            if outcome == OK:
                answered.set_result(answer)
            else:
                answered.set_exception(ConnectionError(self.failure))

        now_s = time.monotonic()
        self.send(request, Sending(now_s, now_s, None, Recorder(now_s), end, answered.set_exception))
        return await answered

    async def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections:
            connection.close()

    def end(self, connection: "_HttpConnection", sending: Sending, answer: bytes, failure: str) -> None:
        """Ends a request; its connection takes the next one."""
        self._idle.append(connection)
        self.failure = failure or self.failure
        sending.end(sending, Unavailable.reason if failure else OK, answer)


class _HttpConnection(asyncio.Protocol):
    """A connection, which takes the events of httptools' parser, too."""

    def __init__(
        self, authority: str, path: str, on_end: Callable[["_HttpConnection", Sending, bytes, str], None]
    ) -> None:
        self._on_end = on_end
        self._sending: Sending | None = None
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\ncontent-length: ".encode()
        )
        self._address = authority.rpartition(":")
        self._reason, self._body = b"", list[bytes]()
        # Whether the server closes the connection after the last answer, as llama.cpp does after 100.
        self._is_last = False
        self._reopening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes, sending: Sending) -> None:
        self._sending = sending
        data = b"%b%d\r\n\r\n%b" % (self._head, len(request), request)
        if self._is_last:
            self._reopening = asyncio.create_task(self._reopen(data, sending))
        elif self._transport.is_closing():
            self.connection_lost(None)
        else:
            self._transport.write(data)

    async def _reopen(self, data: bytes, sending: Sending) -> None:
        """Sends a request over a new connection."""
        self._transport.abort()
        host, _, port = self._address
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))
        except OSError as error:
            sending.fail(ConnectionError(f"connection lost: {error}"))
            return
        self._is_last = False
        self._transport.write(data)

    def close(self) -> None:
        self._sending = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_status(self, reason: bytes) -> None:
        self._reason = reason

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        answer, sending, status = b"".join(self._body), self._sending, self._parser.get_status_code()
        self._is_last = not self._parser.should_keep_alive()
        self._sending = None
        self._body.clear()
        if sending:
            failure = "" if status == 200 else f"HTTP/1.1 {status} {self._reason.decode()}\n{answer!r}"
            self._on_end(self, sending, answer, failure)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sending and not self._is_last:
            self._sending.fail(ConnectionError(f"connection lost: {exc}"))
