"""The server behind the HTTP door. The one file that knows uvicorn, which parses HTTP with httptools."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from email.utils import formatdate
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from neuronpipe.core.addresses import is_loopback
from neuronpipe.core.background import LoopTurns
from neuronpipe.core.logs import log
from neuronpipe.core.names import Metrics
from neuronpipe.doors.http.app import App
from neuronpipe.doors.http.exchange import HEALTH_ROUTES, LIVE, READY, HttpRequest, HttpResponse, Route
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.platform.process.door import Guard, Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.receiving_budget import Claim
from neuronpipe.platform.tls import ServerTls

# Days, where connections may be idle for ever.
_FOR_EVER_S = 7 * 86_400
# How long a connection whose request was refused takes what the caller is still sending; and when the process stops.
_LINGER_S, _LAST_LINGER_S = 5.0, 1.0
# While it stops, whether all connections have ended.
_LOOK_EVERY_S = 0.05
# What comes is looked at in pieces of this size, or larger ones within a body.
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 10, 16 << 10
_BAD_HEAD = "The request's head, or what stands behind its body, is too large, or did not arrive in time."


class HttpDoor:
    """Takes HTTP/1.1 at an address; a Door (platform/process/door.py).

    `service`: whose health it shows. `port`: known once it listens. `tls`: for HTTPS. `shares_port`: other processes
    listen on it, too.
    """

    port: int

    def __init__(
        self,
        settings: GatewaySettings,
        routes: Sequence[Route],
        service: str,
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self._tls = tls
        self._guard = guard
        self._shares_port = shares_port
        self._routes = routes
        self._service = service
        self.settings = settings
        self._dating: asyncio.Task[None] | None = None

    @property
    def services(self) -> Collection[str]:
        """The service whose health it shows."""
        return (self._service,)

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes its address. Connections are refused until it is open. Raises SetupError."""
        self._health, self.in_flight = health, in_flight
        settings = self.settings
        hosts = _words(settings.http_hosts) or frozenset(["localhost"] if is_loopback(settings.http_listen) else [])
        self._app = App(
            self._routes,
            in_flight,
            settings.max_message_bytes,
            self._guard,
            max_body_bytes=settings.http_max_body_bytes,
            max_input_bytes=settings.max_input_bytes,
            has_metrics_port=bool(settings.metrics_listen),
            hosts=hosts,
            cors_origins=_words(settings.http_cors_origins),
            path_prefix=settings.http_path_prefix,
        )
        self._app.handlers = self._health_handlers()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what callers do wrong is told them
        config = uvicorn.Config(
            self._app,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(settings.max_connection_idle_s) or _FOR_EVER_S,
        )
        config.load()
        state = self._state = ServerState()
        self.listener = Listener(
            settings.http_listen,
            settings,
            state.connections,
            partial(_Connection, self, LoopTurns(), config=config, server_state=state, app_state={}),
            in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "http", "max_connections").add,
            tls=self._tls.context if self._tls else None,
            shares_port=self._shares_port,
        )
        self.port = self.listener.bind("--http-listen")
        in_flight.meters.gauge(Metrics.CONNECTIONS, lambda: len(state.connections), "http")
        self._dating = asyncio.create_task(_keep_date(state))

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers requests from now on. Raises SetupError where it cannot listen any more."""
        self._app.handlers = {**handlers, **self._health_handlers()}
        self.listener.listen()
        log("listening for HTTP", address=f"{self.settings.http_listen.rpartition(':')[0]}:{self.port}")

    def ask_to_leave(self) -> None:
        """Ends connections with their answers."""
        self._app.is_draining = True

    async def stop_listening(self, limit_s: float) -> None:
        """Each answer ends its connection already, also that of a new one."""

    def drain(self) -> None:
        """Ends streams, and asks callers to connect elsewhere."""
        self._app.drain()

    async def stop(self, grace_s: float) -> None:
        """Closes idle connections, waits for answers to leave, and then cancels what is left."""
        if not self._dating:
            return
        self.listener.close()
        self.listener.end_handshakes()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110 (uvicorn has no event for it)
                    await asyncio.sleep(_LOOK_EVERY_S)
        for task in self._state.tasks:
            task.cancel()
        self._dating.cancel()

    def _health_handlers(self) -> dict[str, Handler]:
        def is_serving() -> bool:
            return all(self._health.is_serving(service) for service in ("", self._service))

        async def tell(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b"", "text/plain", status=200 if is_serving() else 503)

        async def ready(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b'{"ready":true}') if is_serving() else HttpResponse(b'{"ready":false}', status=503)

        async def live(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b'{"live":true}')

        return {route.key: tell for route in HEALTH_ROUTES} | {LIVE.key: live, READY.key: ready}


def _words(names: str) -> frozenset[str]:
    """What commas separate, in lower case."""
    return frozenset(filter(None, map(str.strip, names.lower().split(","))))


class _BadHead(Exception):
    def __init__(self, message: str = _BAD_HEAD, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _AnyLength(int):
    """The length of an answer to HTTP/1.0, where one without `content-length` ends with its connection instead of in
    chunks (RFC 9112, 6.1 and 6.3): uvicorn, which would send chunks, finds it neither too long nor too short.
    """

    def __lt__(self, other: object) -> bool:
        return False

    __ne__ = __lt__

    def __sub__(self, other: object) -> "_AnyLength":
        return self


class _Connection(HttpToolsProtocol):
    """Ends a connection that is one too many, whose next head does not arrive within its limits, whose caller does not
    read, or that is old: uvicorn has no such limits. What has come behind requests that wait for their answers stays
    bytes.
    """

    transport: "_OwnTransport"  # type: ignore[assignment]  # it is none of asyncio's

    def __init__(self, door: HttpDoor, turns: LoopTurns, **fields: Any) -> None:
        super().__init__(**fields)
        self._door = door
        self._limits, self._in_flight = door.settings, door.in_flight
        self._turns = turns
        # What has come and waits, and the requests of all time.
        self._held, self._requests = b"", 0
        self._unread: asyncio.TimerHandle | None = None
        self._claim: Claim | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._has_rest = False  # whether the caller is still sending its request
        own = _OwnTransport(transport, lambda: self._has_rest or bool(self._held), self._limits.max_send_s)
        super().connection_made(own)  # type: ignore[arg-type]
        self._is_in_head, self._is_in_trailers = True, False
        # Of a head that is not complete, and of its fields with those of the trailers.
        self._head_bytes = self._field_bytes = 0
        self._made_s = self.loop.time()
        self._door.listener.handshakes.pop(self, None)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._end_unread()
        self.transport.has_rest = bool  # false; what was here keeps this connection

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.max_send_s, self._abort, "max_send_s")
        self._claim = Claim(str(id(self)), lambda error: self._abort("max_send_s"))
        self._in_flight.unread.grow(self._claim, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()

    def _end_unread(self) -> None:
        if self._unread:
            self._unread.cancel()
        if self._claim:
            self._in_flight.unread.end(self._claim)
        self._unread = self._claim = None

    def shutdown(self) -> None:
        """The process stops: ends it after the answer that is due. A caller that is still sending gets a moment."""
        self.transport.linger_s = _LAST_LINGER_S
        if self.transport.is_closing():
            self.loop.call_later(_LAST_LINGER_S, self.transport.close)
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # or it would be open until the caller has read its answer
            self._abort("max_connection_idle_s")
        elif not self.transport.is_closing():
            self._count("max_connection_idle_s")
            super().timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.pipeline:
            self._turns.wait(self._take_held)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._is_in_head, self._is_in_trailers = True, False
        self._head_bytes = self._field_bytes = 0
        self._has_rest = True

    def on_url(self, url: bytes) -> None:
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_field(len(name) + len(value))
        if self._is_in_head:  # trailers mean nothing here
            super().on_header(name, value)

    def _count_field(self, size_bytes: int) -> None:
        self._field_bytes += size_bytes
        if self._field_bytes > self._limits.max_header_bytes:
            self._count("max_header_bytes")
            raise _BadHead  # the parser then says that it failed

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if self._asks_for_other_protocol:
            return
        self._check_framing()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.waiting_for_100_continue = False  # that is for newer callers (RFC 9110, 10.1.1)
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
        max_age_s = self._limits.max_connection_age_s
        if max_age_s and self.loop.time() - self._made_s >= max_age_s:
            self.cycle.keep_alive = False

    def _check_framing(self) -> None:
        """Refuses what a proxy before this door may take for another request (RFC 9112, 3.2 and 6.1). The parser has
        refused the rest of it.
        """
        is_old, hosts = self.parser.get_http_version() == "1.0", sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or not (hosts or is_old):
            raise _BadHead(f"A request has one field host; this one has {hosts}.")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and is_old:
            raise _BadHead("HTTP/1.0 has no transfer-encoding.")
        if codings not in ([], [b"chunked"]):
            status = 501 if codings[-1].endswith(b"chunked") else 400
            raise _BadHead("Of transfer-encoding, only chunked is known; content-encoding may be gzip.", status)

    def on_chunk_header(self) -> None:
        self._is_in_trailers = True  # unless a body follows

    def on_body(self, body: bytes) -> None:
        self._is_in_trailers = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_other_protocol:
            return
        super().on_message_complete()
        self._has_rest = self._is_in_trailers = False

    def _refuse(self, message: str, status: int = 400) -> None:
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if self.pipeline or cycle.response_started or not cycle.more_body:
                self.transport.abort()  # what would be sent now would be taken for the answer of that request
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._has_rest = True
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(message)),
            (b"connection", b"close"),
        ]
        head = STATUS_LINE[status] + b"".join(b"%s: %s\r\n" % field for field in fields)
        self.transport.write(head + b"\r\n" + message.encode())
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._take_held()

    def _take_held(self) -> None:
        held, begin, size, first, began_s = self._held, 0, _PIECE_BYTES, self._requests, time.monotonic()
        while begin < len(held) and not (self.pipeline or self.transport.is_closing()):
            before = self._requests
            if not self._turns.has_room_after(before - first, began_s):
                self._turns.wait(self._take_held)
                break
            self._take(held[begin : begin + size])
            begin += size
            size = _PIECE_BYTES if self._is_in_head or self._requests > before else min(2 * size, _MAX_PIECE_BYTES)
        self._turns.take(self._requests - first, began_s)
        self._held = b"" if self.transport.is_closing() else held[begin:]
        was_held, self.transport.is_held = self.transport.is_held, bool(self._held)
        if self._held:
            self._stop_timer()  # the rest of the head has come: it is not the caller who is late
            self.transport.pause_reading()
        elif was_held and not self.flow.read_paused:
            self.transport.resume_reading()

    def _take(self, data: bytes) -> None:
        was_in_trailers = self._is_in_trailers
        self._unset_keepalive_if_required()
        self._feed(data)
        if self.transport.is_closing():
            return
        if self._is_in_head or (was_in_trailers and self._is_in_trailers):  # more of it is to come
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._end("max_header_bytes")
            elif self._is_in_head and self._timer is None:
                self._start_timer()

    @property
    def _asks_for_other_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                if self._asks_for_other_protocol:
                    data = self._without_question(data[end.args[0] :])
                    continue
            except httptools.HttpParserError as error:
                bad = error.__context__
                if isinstance(bad, _BadHead):
                    self._refuse(str(bad), bad.status)
                else:
                    self._refuse("Invalid HTTP request received.")
            return

    def _without_question(self, rest: bytes) -> bytes:
        """A head that asks for another protocol, without the question, and what came behind it, for another parser: the
        first one ends behind such a head. Java's client asks for h2c with each request, which is ignored (RFC 9110,
        section 7.8).
        """
        is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self.headers if name not in (b"connection", b"upgrade")]
        head += [b"connection: close"] * is_last + [b"", rest]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(head)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.max_handshake_s, self._end, "max_handshake_s")

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _count(self, limit: str) -> None:
        self._in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "http", limit).add()

    def _abort(self, limit: str) -> None:
        self._count(limit)
        self.transport.abort()

    def _end(self, limit: str) -> None:
        self._count(limit)
        if not self.transport.is_closing():
            self._refuse(_BAD_HEAD)


class _OwnTransport:
    """A transport that takes the rest of a request before it closes: a connection that is closed with bytes unread is
    reset, and the caller can lose its answer (RFC 9112, section 9.6). Like nginx's `lingering_close`.

    `is_held`: it reads no more, as something that was read waits. `linger_s`: the time for the rest.
    """

    linger_s = _LINGER_S

    def __init__(self, transport: asyncio.Transport, has_rest: Callable[[], bool], max_send_s: float) -> None:
        self._transport = transport
        self.has_rest = has_rest
        self._max_send_s = max_send_s
        self._is_lingering = self.is_held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def resume_reading(self) -> None:
        if not self.is_held:
            self._transport.resume_reading()

    def close(self) -> None:
        if self.is_closing() or not self.has_rest():
            self._end()
            return
        self._is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(self.linger_s, self._end)

    def _end(self) -> None:
        if self._transport.get_write_buffer_size():  # or a caller that reads nothing would keep it for ever
            asyncio.get_running_loop().call_later(self._max_send_s, self._transport.abort)
        self._transport.close()


async def _keep_date(state: ServerState) -> None:
    """Puts the date into all answers."""
    while True:
        state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        await asyncio.sleep(1)
