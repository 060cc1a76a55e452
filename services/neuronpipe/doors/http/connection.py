"""The connections of the HTTP door, which answer requests in their order and keep callers within limits."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from email.utils import formatdate
from enum import Enum
from functools import partial

from neuronpipe.core.deadlines import LAST_LOOK_S, Deadlines
from neuronpipe.core.names import Metrics
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors.http.request_parser import BAD_HEAD, BadRequest, RequestParser, RequestPhase
from neuronpipe.doors.http.wire import REQUEST_ID_HEADER, STATUS_LINES, Application, Exchange, RequestHead
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.paced_input import LoopTurns, PacedInput
from neuronpipe.platform.process.receiving_budget import Claim
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls

# Seconds for which a connection takes the rest of a refused request: in service, and while the process stops.
_LINGER_S, _LAST_LINGER_S = 5.0, 1.0
_CUT = "The connection ended within the request."


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
        self.turns, self.deadlines = LoopTurns(), Deadlines(LAST_LOOK_S)
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
        """Returns the header line `date:` of this second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s, self._date = now_s, b"date: %s\r\n" % formatdate(now_s, usegmt=True).encode()
        return self._date

    def answer(self, exchange: Exchange) -> None:
        """Starts a task that answers a request.

        The task has an empty context, because the present context may be the context of the previous request.
        """
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


class _Awaited(Enum):
    """The act of a caller for which a time limit runs."""

    NOTHING = "no act: no limit runs"
    HEAD = "the rest of a head"
    REQUEST = "a request, on an idle connection"


class HttpConnection(asyncio.Protocol):
    """A connection of a caller. It parses requests, and answers one at a time.

    A connection ends when its next head does not arrive within the limits, when its caller does not read, and when it
    is idle or old. Bytes behind a request that waits for its answer are not parsed.

    Before a connection closes, it lingers: it takes the rest of its request. The operating system resets a connection
    that is closed with unread bytes, and the caller can lose its answer (RFC 9112, section 9.6). nginx does the same
    (`lingering_close`).
    """

    transport: asyncio.Transport
    peer: str

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits, self._in_flight = server.limits, server.in_flight
        self._loop = asyncio.get_running_loop()
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        self._parser = RequestParser(self, self._limits.max_header_bytes)
        self.pipeline = deque[Exchange]()  # parsed requests that wait for their turn
        # The request that is being answered, and the newest request until its answer is complete.
        self._running: Exchange | None = None
        self._latest: Exchange | None = None
        self._awaited = _Awaited.NOTHING
        self._claim: Claim | None = None  # for bytes that the caller does not read
        # While it lingers, the connection takes the rest of a request, until `_ending`.
        self._is_lingering, self._linger_s = False, _LINGER_S
        self._ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._input = PacedInput(self._server.turns, transport)
        self._made_s = self._loop.time()
        self.peer = f"{transport.get_extra_info('peername')}"
        self._server.connections.add(self)
        self._server.listener.handshakes.pop(self, None)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.end(self)
        for exchange in (self._running, self._latest, *self.pipeline):
            if exchange:
                exchange.leave()
        self._running = self._latest = None
        self._parser.close()
        self.pipeline.clear()
        self.is_writable.set()
        self._input.waiting = b""
        self._await_nothing()
        self._end_unread()
        if self._ending:
            self._ending.cancel()

    def eof_received(self) -> None:
        """Ends the connection, because the caller has left. The transport still sends its bytes, within the limits.

        A caller that has ended only its side (shutdown) looks like a caller that has closed the connection. Work for a
        closed connection must end, so both count as leaving. Uvicorn, Hypercorn, nginx as a proxy and the contexts of
        Go's net/http do the same.
        """
        latest = self._latest
        is_cut = (
            latest.more_body and not (latest.has_begun or self.pipeline)
            if latest
            else self._parser.phase is RequestPhase.HEAD
        )
        if is_cut and not self.is_closing:
            self._refuse(BadRequest(_CUT))
        self._end_transport()

    def pause_writing(self) -> None:
        self.is_writable.clear()
        deadline_s = time.monotonic() + self._limits.max_send_s
        self._server.deadlines.add((self, "unread"), deadline_s, partial(self._abort, "max_send_s"))
        self._claim = Claim(str(id(self)), lambda error: self._abort("max_send_s"))
        self._in_flight.unread.grow(self._claim, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.is_writable.set()
        self._end_unread()

    def _end_unread(self) -> None:
        self._server.deadlines.remove((self, "unread"))
        if self._claim:
            self._in_flight.unread.release(self._claim)
            self._claim = None

    def data_received(self, data: bytes) -> None:
        self._input.waiting += data
        self.parse_input()

    def parse_input(self) -> None:
        self._input.parse_by(self)
        if self.is_closing:
            self._input.waiting = b""
        elif self._input.waiting:
            self._await_nothing()  # bytes of the caller wait, so the caller is not late
        self.regulate_reading()
        self._await_request()

    def can_parse(self) -> bool:
        return not (self.pipeline or self.is_closing)

    def parse(self, piece: bytes) -> bool:
        """Parses a piece of the input. Pieces stay small within a head."""
        parser = self._parser
        try:
            parser.feed(piece)
        except BadRequest as bad:
            self._refuse_bad(bad)
            return True
        is_in_head = parser.phase is RequestPhase.HEAD
        if is_in_head and self._awaited is not _Awaited.HEAD and not self.is_closing:
            self._await_head()
        return not is_in_head

    def _refuse_bad(self, bad: BadRequest) -> None:
        if bad.limit:
            self._server.count(bad.limit)
        if self._latest and not self._latest.more_body:  # earlier requests are still answered
            self._latest.keeps_alive = False
            self._parser.close()
            self._await_nothing()
        elif not self.is_closing:
            self._refuse(bad)

    def begin_request(self) -> None:
        """Takes the first byte of a request from the parser."""
        self._input.calls += 1
        if self._awaited is _Awaited.REQUEST:
            self._await_nothing()

    def take_head(self, head: RequestHead, *, is_persistent: bool, is_awaited: bool) -> None:
        """Takes a head from the parser, and begins its exchange. `is_persistent`: another request may follow."""
        if self._awaited is _Awaited.HEAD:
            self._await_nothing()
        max_age_s = self._limits.max_connection_age_s
        is_young = not max_age_s or self._loop.time() - self._made_s < max_age_s
        self._latest = Exchange(self, head, keeps_alive=is_persistent and is_young, is_awaited=is_awaited)
        self.pipeline.append(self._latest)
        if not self._running:
            self._answer_next()

    def take_body(self, body: bytes) -> None:
        """Takes a part of a body from the parser."""
        if self._latest:
            self._latest.take(body)

    def end_body(self) -> None:
        """Takes the end of a request from the parser."""
        if self._latest:
            self._latest.end_body()

    def date(self) -> bytes:
        """Returns the header line `date:`."""
        return self._server.date()

    def end_answer(self, exchange: Exchange) -> None:
        """Continues after a complete answer: with the next request, or the end of the connection."""
        self._running = None
        if self._latest is exchange:
            self._latest = None
        if not exchange.keeps_alive:
            self._close()
        elif not self.is_closing:
            self._answer_next()
            if self._input.waiting and not self.pipeline:
                self._server.turns.wait(self.parse_input)
            self.regulate_reading()
            self._await_request()

    def break_off(self, exchange: Exchange) -> None:
        """Ends an answer that will not be completed, and the connection."""
        if exchange.has_begun:
            self._close()
        else:
            self._write_refusal("" if exchange.head.method == "HEAD" else "Internal Server Error", 500)

    def shutdown(self) -> None:
        """Ends the connection after its present answer. A caller that still sends gets `_LAST_LINGER_S` to finish."""
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

    def _refuse(self, bad: BadRequest) -> None:
        exchange = self._latest
        if exchange:
            if self.pipeline or exchange.has_begun or not exchange.more_body:
                self.transport.abort()  # a refusal would look like the answer to that request
                return
            exchange.leave()
        self._parser.close()
        self._write_refusal(bad.message, bad.status)

    def _write_refusal(self, message: str, status: int) -> None:
        request_id = b"%s: %s\r\n" % (REQUEST_ID_HEADER, new_request_id().encode())
        head = b"%s%s%scontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        values = STATUS_LINES[status], self.date(), request_id, len(message)
        self.transport.write(head % values + message.encode())
        self._close()

    def _close(self) -> None:
        if self.is_closing or (self._parser.phase is RequestPhase.DONE and not self._input.waiting):
            self._end_transport()
            return
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.regulate_reading()
        self._end_later(self._linger_s, self._end_transport)

    def _end_transport(self) -> None:
        if self.transport.get_write_buffer_size():  # otherwise a caller that reads nothing keeps the connection
            self._end_later(self._limits.max_send_s, self.transport.abort)
        self.transport.close()

    def _end_later(self, delay_s: float, end: Callable[[], None]) -> None:
        if self._ending:
            self._ending.cancel()
        self._ending = self._loop.call_later(delay_s, end)

    def regulate_reading(self) -> None:
        """Stops reading while bytes, requests or a large part of a body wait, and then reads again."""
        is_full = self._input.waiting or self.pipeline or (self._latest and self._latest.is_full)
        self._input.regulate(is_full=bool(is_full) and not self._is_lingering)

    def _await_head(self) -> None:
        """Starts the time limit for a head that has not arrived."""
        self._awaited = _Awaited.HEAD
        self._server.deadlines.add(self, time.monotonic() + self._limits.max_handshake_s, self._end_late_head)

    def _await_request(self) -> None:
        """Starts the time limit for an idle connection, if the connection waits for a request."""
        limit_s = self._limits.max_connection_idle_s
        is_idle = self._awaited is _Awaited.NOTHING and not (self._running or self._input.waiting or self.is_closing)
        if limit_s and is_idle:
            self._awaited = _Awaited.REQUEST
            self._server.deadlines.add(self, time.monotonic() + limit_s, self._leave_idle)

    def _await_nothing(self) -> None:
        if self._awaited is not _Awaited.NOTHING:
            self._awaited = _Awaited.NOTHING
            self._server.deadlines.remove(self)

    def _leave_idle(self) -> None:
        if self.transport.get_write_buffer_size():  # `_close` would wait until the caller has read its answer
            self._abort("max_connection_idle_s")
        elif not self.is_closing:
            self._server.count("max_connection_idle_s")
            self._close()

    def _abort(self, limit: str) -> None:
        self._server.count(limit)
        self.transport.abort()

    def _end_late_head(self) -> None:
        self._server.count("max_handshake_s")
        if not self.is_closing:
            self._refuse(BadRequest(BAD_HEAD))
