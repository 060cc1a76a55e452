"""The connections of the HTTP door: each parses its requests with httptools, and has them answered in turn."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from email.utils import formatdate
from functools import partial
from urllib.parse import unquote

import httptools

from neuronpipe.core.names import Metrics
from neuronpipe.doors.http.asgi import STATUS_LINES, Application, Exchange
from neuronpipe.platform.process.background import LoopTurns
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.receiving_budget import Claim
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls

# Time for which a connection whose request was refused takes the rest of the request, in service and while the process
# stops.
_LINGER_S, _LAST_LINGER_S = 5.0, 1.0
# Time for which a connection is still read before the caller is said to be late. uvloop runs timers before it reads:
# after a process has stood still, the caller's bytes would come too late.
_LAST_LOOK_S = 0.01
# Size of the pieces of the input that the parser gets, and the largest size within a body.
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 10, 16 << 10
_BAD_HEAD = "The request's head, or what stands behind its body, is too large, or did not arrive in time."
# Characters of a host's name or address with its port (RFC 3986, 3.2.2).
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")
_VERSIONS = "This port takes HTTP/1.1."


class _CallerLimit:
    """Calls a function once the caller has not acted for a time, unless it is cancelled."""

    def __init__(self, limit_s: float, end: Callable[..., None], *arguments: str) -> None:
        self._end, self._arguments = end, arguments
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LAST_LOOK_S, self._end, *self._arguments)

    def cancel(self) -> None:
        self._timer.cancel()


class HttpServer:
    """The connections of a door, and the tasks that answer their requests."""

    def __init__(
        self,
        app: Application,
        address: str,
        limits: ProcessSettings,
        in_flight: InFlight,
        tls: ServerTls | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self.limits, self.in_flight = limits, in_flight
        self.turns = LoopTurns()
        self.connections: set[HttpConnection] = set()
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = asyncio.Event()
        self._date_s, self._date = 0, b""
        self.listener = Listener(
            address,
            limits,
            self.connections,
            partial(HttpConnection, self),
            partial(self.count, "max_connections"),
            tls=tls.context if tls else None,
            shares_port=shares_port,
        )

    def count(self, limit: str) -> None:
        """Counts a connection that a limit has ended."""
        self.in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "http", limit).add()

    def date(self) -> bytes:
        """Returns the field of each answer with the current second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s, self._date = now_s, b"date: %s\r\n" % formatdate(now_s, usegmt=True).encode()
        return self._date

    def answer(self, exchange: Exchange) -> None:
        """Begins to answer a request, not in the context of the request before."""
        task = asyncio.get_running_loop().create_task(exchange.run(self._app), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._has_ended.set()

    def end(self, connection: "HttpConnection") -> None:
        """Forgets a connection that has ended."""
        self.connections.discard(connection)
        self._has_ended.set()

    async def stop(self, grace_s: float) -> None:
        """Closes idle connections, waits for answers to leave, and then cancels the rest."""
        self.listener.close()
        self.listener.end_handshakes()
        for connection in list(self.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(grace_s):
                while self.connections or self._tasks:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            for task in self._tasks:
                task.cancel()


class _BadHead(Exception):
    def __init__(self, message: str = _BAD_HEAD, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class HttpConnection(asyncio.Protocol):
    """Parses the requests of a caller, and has them answered in turn.

    A connection ends when its next head does not arrive within the limits, when its caller does not read, and when it
    is idle or old. Bytes behind requests that wait for their answers are not parsed.

    Before a connection closes, it takes the rest of its request: a connection that is closed with unread bytes is
    reset, and the caller can lose its answer (RFC 9112, section 9.6). nginx does the same (`lingering_close`).
    """

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits, self._in_flight = server.limits, server.in_flight
        self._loop = asyncio.get_running_loop()
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        # Bytes that wait to be parsed, the number of all requests, and the parsed requests that wait.
        self._held, self._requests = b"", 0
        self.pipeline = deque[Exchange]()
        # The request that is answered now, and the request that was parsed last, until its answer is complete.
        self._running: Exchange | None = None
        self._latest: Exchange | None = None
        self._is_full = self._is_paused = self._is_lingering = False
        self._linger_s = _LINGER_S
        self._unread: _CallerLimit | None = None
        self._claim: Claim | None = None
        # The limits of the next head, and of a connection without a request.
        self._timer: _CallerLimit | None = None
        self._idle: _CallerLimit | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._has_rest = False  # whether the caller is still sending its request
        self._is_in_head, self._is_in_trailers = True, False
        # Size of an incomplete head, or of trailers, without the piece in which they begin; size of the fields of both;
        # size of the piece that is parsed now.
        self._head_bytes = self._field_bytes = self._piece_bytes = 0
        self._url, self._fields = b"", list[tuple[bytes, bytes]]()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._made_s = self._loop.time()
        self._client = transport.get_extra_info("peername")
        self._server.connections.add(self)
        self._server.listener.handshakes.pop(self, None)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.end(self)
        for exchange in (self._running, self._latest, *self.pipeline):
            if exchange:
                exchange.leave()
        self._running = self._latest = self._parser = None
        self.pipeline.clear()
        self.is_writable.set()
        self._held = b""
        self._stop_timer()
        self._end_idle()
        self._end_unread()
        if self._ending:
            self._ending.cancel()

    def eof_received(self) -> None:
        """Ends the connection, because the caller has left. Bytes that were written are sent within the limits."""
        self._end_transport()

    def pause_writing(self) -> None:
        self.is_writable.clear()
        self._unread = _CallerLimit(self._limits.max_send_s, self._abort, "max_send_s")
        self._claim = Claim(str(id(self)), lambda error: self._abort("max_send_s"))
        self._in_flight.unread.grow(self._claim, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.is_writable.set()
        self._end_unread()

    def _end_unread(self) -> None:
        if self._unread:
            self._unread.cancel()
        if self._claim:
            self._in_flight.unread.end(self._claim)
        self._unread = self._claim = None

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._take_held()

    def _take_held(self) -> None:
        held, begin, size, first, began_s = self._held, 0, _PIECE_BYTES, self._requests, time.monotonic()
        turns = self._server.turns
        while begin < len(held) and not (self.pipeline or self.is_closing):
            before = self._requests
            if not turns.has_room_after(before - first, began_s):
                turns.wait(self._take_held)
                break
            self._take(held[begin : begin + size])
            begin += size
            size = _PIECE_BYTES if self._is_in_head or self._requests > before else min(2 * size, _MAX_PIECE_BYTES)
        turns.take(self._requests - first, began_s)
        self._held = b"" if self.is_closing else held[begin:]
        if self._held:
            self._stop_timer()  # the rest of the head has come: the caller is not late
        self._regulate_reading()
        self._begin_idle()

    def _take(self, data: bytes) -> None:
        self._piece_bytes = len(data)
        self._feed(data)
        if self.is_closing:
            return
        if self._is_in_head or self._is_in_trailers:  # the rest is still to come
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._end("max_header_bytes")
            elif self._is_in_head and self._timer is None:
                self._start_timer()

    def _feed(self, data: bytes) -> None:
        while parser := self._parser:
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                if self._asks_for_other_protocol:
                    data = self._without_question(parser, data[end.args[0] :])
                    continue
            except httptools.HttpParserError as error:
                bad = error.__context__
                if self._latest and not self._latest.more_body:  # the requests before are answered
                    self._latest.keeps_alive = self._is_in_head = False
                    self._parser = None
                    self._stop_timer()
                elif isinstance(bad, _BadHead):
                    self._refuse(str(bad), bad.status)
                elif parser.get_method() == b"PRI":  # a caller speaks HTTP/2
                    self._refuse(_VERSIONS, 505)
                else:
                    self._refuse("Invalid HTTP request received.")
            return

    def _without_question(self, parser: httptools.HttpRequestParser, rest: bytes) -> bytes:
        """Returns the head without its request for another protocol, and the bytes behind the head, for a new parser.

        The first parser ends behind such a head. Java's client asks for h2c with each request, which is ignored (RFC
        9110, section 7.8).
        """
        is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self._fields)
        head = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self._fields if name not in (b"connection", b"upgrade")]
        head += [b"connection: close"] * is_last + [b"", rest]
        self._parser = self._new_parser()
        return b"\r\n".join(head)

    @property
    def _asks_for_other_protocol(self) -> bool:
        parser = self._parser
        return bool(parser and parser.should_upgrade() and parser.get_method() != b"CONNECT")

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._requests += 1
        self._end_idle()
        self._is_in_head, self._is_in_trailers = True, False
        self._head_bytes, self._field_bytes = -self._piece_bytes, 0
        self._url, self._fields = b"", []
        self._has_rest = True

    def on_url(self, url: bytes) -> None:
        """Takes a part of the target."""
        self._count_field(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a field of the head. Fields of trailers are only counted."""
        self._count_field(len(name) + len(value))
        if self._is_in_head:
            self._fields.append((name.lower(), value))

    def _count_field(self, size_bytes: int) -> None:
        self._field_bytes += size_bytes
        if self._field_bytes > self._limits.max_header_bytes:
            self._server.count("max_header_bytes")
            raise _BadHead  # the parser then says that it failed

    def on_headers_complete(self) -> None:
        """Begins the exchange at the end of its head."""
        self._is_in_head = False
        self._stop_timer()
        parser = self._parser
        if parser is None or self._asks_for_other_protocol:
            return
        version = parser.get_http_version()
        self._check_framing(version)
        target = httptools.parse_url(self._url)
        if target.host:  # the host of an absolute target replaces the field (RFC 9112, 3.2.2)
            host = self._url.split(b"/", 3)[2].partition(b"?")[0]
            self._fields = [(name, host if name == b"host" else value) for name, value in self._fields]
        scope = {
            "http_version": version,
            "method": parser.get_method().decode(),
            "path": unquote((target.path or b"/").decode("ascii")),
            "query_string": target.query or b"",
            "headers": self._fields,
            "client": self._client,
        }
        max_age_s = self._limits.max_connection_age_s
        is_young = not max_age_s or self._loop.time() - self._made_s < max_age_s
        keeps_alive = is_young and version != "1.0" and parser.should_keep_alive()
        # 100-continue is for newer callers (RFC 9110, 10.1.1).
        is_awaited = version != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in self._fields
        )
        self._latest = Exchange(self, scope, keeps_alive=keeps_alive, is_awaited=is_awaited)
        self.pipeline.append(self._latest)
        if not self._running:
            self._answer_next()

    def _check_framing(self, version: str) -> None:
        """Refuses a head that a proxy may take for another request (RFC 9112, 3.2 and 6.1), if the parser has not."""
        is_old = version == "1.0"
        if not is_old and version != "1.1":
            raise _BadHead(_VERSIONS, 505)
        hosts = [value for name, value in self._fields if name == b"host"]
        if len(hosts) > 1 or not (hosts or is_old):
            raise _BadHead(f"A request has one field host; this one has {len(hosts)}.")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise _BadHead("The field host has a character that no host has.")
        codings = [value.strip().lower() for name, value in self._fields if name == b"transfer-encoding"]
        if codings and is_old:
            raise _BadHead("HTTP/1.0 has no transfer-encoding.")
        if codings not in ([], [b"chunked"]):
            status = 501 if codings[-1].endswith(b"chunked") else 400
            raise _BadHead("Of transfer-encoding, only chunked is known; content-encoding may be gzip.", status)

    def on_chunk_header(self) -> None:
        """Begins a chunk, or the trailers if no body follows."""
        self._is_in_trailers = True
        self._head_bytes = -self._piece_bytes

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._is_in_trailers = False
        if self._latest:
            self._is_full = self._latest.take(body)

    def on_message_complete(self) -> None:
        """Ends the body of the request."""
        if self._asks_for_other_protocol:
            return
        if self._latest:
            self._latest.end_body()
        self._has_rest = self._is_in_trailers = False

    def date(self) -> bytes:
        """Returns the field with the current time."""
        return self._server.date()

    def read_body(self) -> None:
        """Continues to read a body for the application."""
        self._is_full = False
        self._regulate_reading()

    def end_answer(self, exchange: Exchange) -> None:
        """Continues after a complete answer: with the next request, or the end of the connection."""
        self._running = None
        if self._latest is exchange:
            self._latest = None
        self._is_full = False
        if not exchange.keeps_alive:
            self._close()
        elif not self.is_closing:
            self._answer_next()
            if self._held and not self.pipeline:
                self._server.turns.wait(self._take_held)
            self._regulate_reading()
            self._begin_idle()

    def break_off(self, exchange: Exchange) -> None:
        """Ends an answer that will not be completed, and the connection."""
        if exchange.has_begun:
            self._close()
        else:
            self._write_refusal("" if exchange.is_of_head else "Internal Server Error", 500)

    def shutdown(self) -> None:
        """Ends the connection after its present answer. A caller that is still sending has a moment to finish."""
        self._linger_s = _LAST_LINGER_S
        if self.is_closing:
            self._end_later(_LAST_LINGER_S, self._end_transport)
        elif self._latest:
            self._latest.keeps_alive = False
        elif not self._running:
            self._close()

    def _answer_next(self) -> None:
        if self.pipeline:
            self._running = self.pipeline.popleft()
            self._server.answer(self._running)

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed, or takes the rest of a request before it closes."""
        return self._is_lingering or self.transport.is_closing()

    def _refuse(self, message: str, status: int = 400) -> None:
        exchange = self._latest
        if exchange:
            if self.pipeline or exchange.has_begun or not exchange.more_body:
                self.transport.abort()  # the caller would take a refusal for the answer to that request
                return
            exchange.leave()
        self._has_rest = True
        self._write_refusal(message, status)

    def _write_refusal(self, message: str, status: int) -> None:
        head = b"%s%scontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINES[status], self.date(), len(message)) + message.encode())
        self._close()

    def _close(self) -> None:
        if self.is_closing or not (self._has_rest or self._held):
            self._end_transport()
            return
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._regulate_reading()
        self._end_later(self._linger_s, self._end_transport)

    def _end_transport(self) -> None:
        if self.transport.get_write_buffer_size():  # a caller that reads nothing would keep the connection for ever
            self._end_later(self._limits.max_send_s, self.transport.abort)
        self.transport.close()

    def _end_later(self, delay_s: float, end: Callable[[], None]) -> None:
        if self._ending:
            self._ending.cancel()
        self._ending = self._loop.call_later(delay_s, end)

    def _regulate_reading(self) -> None:
        """Stops reading while bytes or requests wait."""
        is_paused = bool(self._held or self.pipeline or self._is_full) and not self._is_lingering
        if is_paused != self._is_paused and not self.transport.is_closing():
            self._is_paused = is_paused
            if is_paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _start_timer(self) -> None:
        self._timer = _CallerLimit(self._limits.max_handshake_s, self._end, "max_handshake_s")

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _begin_idle(self) -> None:
        """Begins the limit of an idle connection, if the connection waits for a request."""
        limit_s = self._limits.max_connection_idle_s
        if limit_s and not (self._running or self._held or self._timer or self._idle or self.is_closing):
            self._idle = _CallerLimit(limit_s, self._leave_idle)

    def _end_idle(self) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None

    def _leave_idle(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait until the caller has read its answer
            self._abort("max_connection_idle_s")
        elif not self.is_closing:
            self._server.count("max_connection_idle_s")
            self._close()

    def _abort(self, limit: str) -> None:
        self._server.count(limit)
        self.transport.abort()

    def _end(self, limit: str) -> None:
        self._server.count(limit)
        if not self.is_closing:
            self._refuse(_BAD_HEAD)
