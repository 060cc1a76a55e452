"""The server's side of gRPC over HTTP/2: calls are seen when their heads come, and refused or answered."""

import asyncio
import base64
import contextlib
import math
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ngh2 import NGH2Error, Role
from ngh2.events import RequestReceived, SettingsAcknowledged

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.deadlines import Deadlines
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, SetupError
from neuronpipe.core.names import Metrics
from neuronpipe.process.receiving_budget import Claim
from neuronpipe.rpc.call_end import end_of
from neuronpipe.rpc.http2.connection import (
    ENCODINGS,
    INTERNAL,
    NO_ERROR,
    REFUSED_STREAM,
    TLS_CLOSE_S,
    UNIMPLEMENTED,
    Connection,
    Stream,
)
from neuronpipe.rpc.transport import CallEnd, Metadata, Method, ServerOptions
from neuronpipe.rpc.unix_sockets import is_listened_on

_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_OK = ((b"grpc-status", b"0"),)
# gRPC requires 415 for other content types, and clients of gRPC are told by HTTP what is no gRPC.
_NOT_GRPC = ((b":status", b"415"), (b"content-type", b"text/plain"))
_NOT_GRPC_BODY = b"this port speaks gRPC: POST with the content-type application/grpc\n"
# The heads that are not metadata. te and user-agent say nothing that we use.
_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"grpc-accept-encoding", b"grpc-message-type"))
_TIMEOUT_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
# Printable characters but the percent sign stay as they are (PROTOCOL-HTTP2.md, Status-Message).
_MESSAGE_CHARACTERS = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_DRAIN_PING = b"drain\0\0\0"
# A peer that does not acknowledge the notice gets no longer; streams that it opened are answered all the same.
_NOTICE_LIMIT_S = 5.0
_KEEPALIVE_S = 30.0
# For the first message of a call with a stream of messages that is refused.
_REFUSAL_PATIENCE_S = 0.1
_BACKLOG = 1024


class _Call(Stream):
    """One call; a ServerCall of rpc/transport.py."""

    __slots__ = (
        "_arrival",
        "_is_counted",
        "claim",
        "context",
        "deadline_s",
        "has_sent_head",
        "metadata",
        "metadata_bytes",
        "method",
        "refusal",
        "task",
    )

    connection: "_ServerConnection"

    def __init__(self, connection: "_ServerConnection", number: int, max_message_bytes: int) -> None:
        super().__init__(connection, number, max_message_bytes)
        self.metadata: Metadata = ()
        self.metadata_bytes = 0
        self.deadline_s: float | None = None
        self.method: Method | None = None
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_sent_head = self._is_counted = False
        self._arrival: int | None = None
        self.claim: Claim | None = None
        # How it will end, where that was decided by its head.
        self.refusal: CallEnd | None = None

    @property
    def peer(self) -> str:
        return self.connection.peer

    def peer_names(self) -> Sequence[str]:
        return self.connection.peer_names

    # --- its head ---

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Takes the head of the call, and returns its path. Raises CallEnd; _NotGrpc where it is no gRPC."""
        path = method = content_type = b""
        metadata: list[tuple[str, str | bytes]] = []
        for name, value in headers:
            if name[:1] == b":":
                if name == b":path":
                    path = value
                elif name == b":method":
                    method = value
                continue
            self.metadata_bytes += len(name) + len(value)
            if name == b"content-type":
                content_type = value
            elif name == b"grpc-timeout":
                self.deadline_s = time.monotonic() + _timeout_s(value)
            elif name == b"grpc-encoding":
                self.encoding = value
            elif name[-4:] == b"-bin":
                metadata += [(name.decode("ascii"), one) for one in _unpacked(value)]
            elif name not in _RESERVED:
                metadata.append((name.decode("latin-1"), value.decode("latin-1")))
        if method != b"POST" or not (
            content_type == b"application/grpc" or content_type.startswith((b"application/grpc+", b"application/grpc;"))
        ):
            raise _NotGrpc
        self.metadata = metadata
        return path.decode("latin-1")

    # --- its messages ---

    def stop_reading(self, error: Exception) -> None:
        self.error = error
        self.drop_received()
        self.wake_reader()

    def can_begin(self) -> bool:
        """Whether it can be answered with what has come."""
        return bool(self.method and self.method.takes_stream) or bool(self.messages) or self.is_ended

    def note_arrival(self) -> None:
        """Limits the memory and the time of a message that is arriving."""
        connection = self.connection
        if self._arrival is None and self.task is None:
            self._arrival = connection.arrivals.begin(self._arrives_too_slowly)
        if self.buffered_bytes:
            claim = self.claim = self.claim or Claim(str(id(connection)), self._refuse)
            if self.buffered_bytes > claim.bytes:
                connection.budget.grow(claim, self.buffered_bytes)
        else:
            self.end_claim()

    def _arrives_too_slowly(self, is_late: bool) -> None:
        limit_s = self.connection.options.settings.max_receive_s
        problem = f"the message took longer than {limit_s:g} s, the limit"
        self._refuse(self.connection.options.in_flight.waited(is_late, problem))

    def _refuse(self, error: NeuronpipeError) -> None:
        if self.task and not self.task.done():
            self.stop_reading(error)
        else:
            self.finish(end_of(error))

    def end_claim(self) -> None:
        """The message that was arriving has come, or never will."""
        if self.claim:
            self.connection.budget.end(self.claim)
            self.claim = None

    def end_arrival(self) -> None:
        """The message of a caller that sends one has come, or never will."""
        if self._arrival is not None:
            self.connection.arrivals.done(self._arrival)
            self._arrival = None

    # --- its answer ---

    def accept(self, method: Method) -> None:
        """Counts it. Raises CallEnd."""
        self.context = copy_context()
        self.method = method
        self.context.run(method.accept, self)
        self._is_counted = True

    def begin(self) -> None:
        """Answers it from now on."""
        self.end_arrival()
        self.task = asyncio.get_running_loop().create_task(self._answer(), context=self.context)

    async def _answer(self) -> None:
        method = self.method
        assert method  # noqa: S101 (it was accepted)
        try:
            request = None
            if not method.takes_stream:
                if self.messages:
                    request = self.next_message()
                    self.drop_received()
                    request = await self.inflated(request)
                else:
                    self.check_end()
            await method.answer(self, request)
            self._finish_well()
            self.connection.flush_if_alone()
        except CallEnd as end:
            self.finish(end)
        except NGH2Error:  # the stream has just ended
            return
        finally:
            self._uncount()

    async def send(self, message: bytes) -> None:
        if self.is_closed:
            raise asyncio.CancelledError
        if not self.has_sent_head:
            self.has_sent_head = True
            self.connection.engine.send_response(self.number, _HEAD)
        self.put(message)
        if self.connection.is_paused or self.connection.engine.queued_body_size(self.number) > len(message):
            await self.wait_for_room()

    def _finish_well(self) -> None:
        if self.is_closed or self.has_sent_end:
            return
        self._end_sending()
        if self.has_sent_head:
            self.connection.engine.send_trailers(self.number, _OK)
        else:
            self.connection.engine.send_response(self.number, (*_HEAD, *_OK), end_stream=True)
        self.connection.has_ended(self)

    def finish(self, end: CallEnd) -> None:
        """Ends it with a status."""
        if self.is_closed or self.has_sent_end:
            return
        self._end_sending()
        trailers = [(b"grpc-status", b"%d" % end.code)]
        if end.message:
            trailers.append((b"grpc-message", quote(end.message, safe=_MESSAGE_CHARACTERS).encode()))
        trailers += [_packed(name, value) for name, value in end.trailers]
        with contextlib.suppress(NGH2Error):
            if self.has_sent_head:
                self.connection.engine.send_trailers(self.number, trailers)
            else:
                self.connection.engine.send_response(self.number, (*_HEAD, *trailers), end_stream=True)
        self.connection.has_ended(self)

    def refuse(self, end: CallEnd) -> None:
        """Ends it by its head; nothing of it is kept. A caller that sends a stream is told once its first message has
        come, or after a moment: grpcio's asynchronous client says INTERNAL where a call ends before it has written.
        """
        if self.is_ended or not (self.method and self.method.takes_stream):
            self.finish(end)
            return
        self.ignores_data, self.refusal = True, end
        self.connection.deadlines.add(self, time.monotonic() + _REFUSAL_PATIENCE_S, partial(self.finish, end))

    def refuse_stream(self) -> None:
        """Says that nothing of it was worked on: clients then repeat it by themselves."""
        self._end_sending()
        with contextlib.suppress(NGH2Error):
            self.connection.engine.reset_stream(self.number, REFUSED_STREAM)
        self.connection.flush_soon()

    def answer_http(self) -> None:
        """Tells a client of HTTP that this is gRPC."""
        self._end_sending()
        with contextlib.suppress(NGH2Error):
            self.connection.engine.send_response(self.number, _NOT_GRPC)
            self.connection.engine.send_data(self.number, _NOT_GRPC_BODY, end_stream=True)
        self.connection.has_ended(self)

    def _end_sending(self) -> None:
        self.has_sent_end = True
        self.drop_received()
        self._forget()

    def expire(self) -> None:
        """Its deadline has passed."""
        if self.is_closed:
            return
        self.finish(end_of(DeadlineExceeded("the deadline passed before the result was ready")))
        if self.task and not self.task.done():
            self.task.cancel()

    def close(self) -> None:
        super().close()
        self._forget()
        if self.task and not self.task.done():
            self.task.cancel()

    def _forget(self) -> None:
        """Nothing waits for the caller any more."""
        self.connection.deadlines.remove(self)
        self.end_arrival()
        self.end_claim()
        if self.task is None:
            self._uncount()

    def _uncount(self) -> None:
        if self._is_counted and self.method:
            self._is_counted = False
            self.method.done(self)


class _NotGrpc(Exception):
    """A request of HTTP that is no gRPC."""


class _ServerConnection(Connection[_Call]):
    """A caller's connection.

    A stop has three steps: the notice, a GOAWAY that leaves the caller its streams of this moment and those on their
    way; when a ping has come back, a GOAWAY that takes no more; and the end, once all streams are over.
    """

    role = Role.SERVER

    def __init__(self, server: "Http2Server") -> None:
        super().__init__(_KEEPALIVE_S)
        self._server = server
        self.options = server.options
        self.arrivals, self.deadlines, self.budget = server.arrivals, server.deadlines, server.options.in_flight.budget
        self.settings = {3: self.options.settings.max_connection_calls, 6: self.options.settings.max_header_bytes}
        self.idle_since_s = 0.0
        self._is_greeted = self._takes_no_more = False
        # Streams that were answered before the caller had sent all.
        self._answered_early: set[_Call] = set()
        # What the caller has not read: of each stream the number of the wait, and the bytes that it must read until the
        # wait is over. None is the connection itself, while the operating system takes nothing.
        self._unread: dict[Stream | None, tuple[int, int]] = {}
        self._leaves_at_s = self._ends_at_s = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = _peer(transport.get_extra_info("peername"))
        self.peer_names = _names(transport.get_extra_info("ssl_object"))
        self.idle_since_s = asyncio.get_running_loop().time()
        self._server.connections.add(self)
        super().connection_made(transport)
        if len(self._server.connections) > self.options.settings.max_connections:
            self.end("max_connections")

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for stream in list(self._unread):
            self._is_read(stream)
        self._server.lost(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(None, 0)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read(None)

    # --- what comes ---

    def take(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            call = _Call(self, event.stream_id, self.options.settings.max_message_bytes)
            call.is_ended = event.end_stream
            self.streams[event.stream_id] = call
            try:
                self._accept(call, call.read_head(event.headers))
                self.touched.append(call)
            except CallEnd as end:
                call.refuse(end)
            except _NotGrpc:
                call.answer_http()
        elif isinstance(event, SettingsAcknowledged):
            self._is_greeted = True
        # Trailers of the caller mean nothing in gRPC.

    def _accept(self, call: _Call, path: str) -> None:
        """Lets a call arrive, or refuses it by its head. Raises CallEnd."""
        if self._server.is_stopping:
            call.refuse_stream()
            return
        method = self.options.find_method(path)
        if method is None:
            raise CallEnd(UNIMPLEMENTED, "Method not found!")
        if call.encoding and call.encoding not in ENCODINGS.split(b","):
            trailers = (("grpc-accept-encoding", ENCODINGS.decode()),)
            raise CallEnd(UNIMPLEMENTED, "grpc-encoding: must be identity, gzip or deflate", trailers)
        call.accept(method)
        if call.deadline_s is not None:
            self.deadlines.add(call, call.deadline_s, call.expire)

    def taken(self, touched: Iterable[_Call]) -> None:
        for call in touched:
            if call.refusal:
                call.finish(call.refusal)
            if call.has_sent_end or call.is_closed:
                continue
            if call.task is None and call.can_begin():
                call.begin()
            if call.task is None or call.buffered_bytes or call.claim:
                call.note_arrival()

    def refuse(self, stream: _Call, end: CallEnd) -> None:
        if stream.task and not stream.task.done():
            stream.stop_reading(end)
        else:
            stream.finish(end)

    def stream_closed(self, stream: _Call, code: int) -> None:
        stream.close()
        self._is_read(stream)
        self._answered_early.discard(stream)
        if not self.streams:
            self.idle_since_s = self.loop.time()

    # --- what goes ---

    def has_ended(self, call: _Call) -> None:
        """A call has queued all that it sends."""
        if not call.is_ended:
            self._answered_early.add(call)
        self.has_written(call)

    def flush_if_alone(self) -> None:
        """Sends at once where there is nothing that could travel along."""
        if len(self.streams) == 1:
            self.flush()

    def flushed(self, written: Iterable[Stream]) -> None:
        engine = self.engine
        if engine.queued_body_size():
            for stream in written:
                if stream not in self._unread and engine.queued_body_size(stream.number):
                    self._await_reading(stream, stream.put_bytes)
        for unread, (_, until_bytes) in list(self._unread.items()):
            if unread is None:
                continue
            left_bytes = engine.queued_body_size(unread.number)
            if unread.put_bytes - left_bytes >= until_bytes:
                self._is_read(unread)
                if left_bytes:
                    self._await_reading(unread, unread.put_bytes)
        for call in list(self._answered_early):
            if not engine.queued_body_size(call.number):
                # Before its last byte was sent, it would take the answer back.
                self._answered_early.discard(call)
                with contextlib.suppress(NGH2Error):
                    engine.reset_stream(call.number, NO_ERROR)
                self.flush_soon()

    def _await_reading(self, stream: Stream | None, until_bytes: int) -> None:
        if stream not in self._unread:
            number = self._server.sends.begin(lambda is_late: self.end("max_send_s"))
            self._unread[stream] = number, until_bytes

    def _is_read(self, stream: Stream | None) -> None:
        if wait := self._unread.pop(stream, None):
            self._server.sends.done(wait[0])

    # --- time, and the end ---

    def check_time(self, now_s: float) -> float | None:
        settings = self.options.settings
        limits = [super().check_time(now_s)]
        if not self._is_greeted:
            limits.append(self.made_s + settings.max_handshake_s)
            if now_s >= self.made_s + settings.max_handshake_s:
                self.end("max_handshake_s")
        if settings.max_connection_idle_s and not self.streams and not self._is_leaving:
            limits.append(self.idle_since_s + settings.max_connection_idle_s)
            if now_s >= self.idle_since_s + settings.max_connection_idle_s:
                self._server.count_ended("max_connection_idle_s")
                self.ask_to_leave()
        elif settings.max_connection_idle_s and not self._is_leaving:
            limits.append(now_s + settings.max_connection_idle_s)
        if settings.max_connection_age_s and not self._is_leaving:
            limits.append(self.made_s + settings.max_connection_age_s)
            if now_s >= self.made_s + settings.max_connection_age_s:
                self._ends_at_s = now_s + settings.max_connection_age_grace_s
                self.ask_to_leave()
        if now_s >= self._leaves_at_s:
            self._take_no_more()
        if now_s >= self._ends_at_s:
            self.end("max_connection_age_grace_s")
        if self.is_lost:
            return None
        return min(limit for limit in (*limits, self._leaves_at_s, self._ends_at_s) if limit and limit > now_s)

    @property
    def _is_leaving(self) -> bool:
        return self._leaves_at_s < math.inf or self._takes_no_more

    def ask_to_leave(self) -> None:
        """Asks the caller to send new calls elsewhere. Those on their way are answered."""
        if self._is_leaving or self.is_lost or self.is_closing:
            return
        self._leaves_at_s = self.loop.time() + _NOTICE_LIMIT_S
        self.engine.send_shutdown_notice()
        self.flush()  # nghttp2 would send the ping first
        if not self.is_lost:
            self.ping(_DRAIN_PING)

    def ping_acknowledged(self, data: bytes) -> None:
        if data == _DRAIN_PING:
            self._take_no_more()

    def _take_no_more(self) -> None:
        """Ends the connection with its last stream."""
        if not self._takes_no_more:
            self._takes_no_more, self._leaves_at_s = True, math.inf
            self.engine.send_goaway(NO_ERROR)
            self.flush_soon()

    def end(self, limit: str) -> None:
        """Ends the connection at once, as the setting of this name says."""
        if not self.is_lost:
            self._server.count_ended(limit)
            self.abort()

    def failed(self, error: NGH2Error) -> None:
        self._server.count_ended("protocol")


class Http2Server:
    """Listens at one address; a Server of rpc/transport.py."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.connections: set[_ServerConnection] = set()
        self.is_stopping = False
        self.deadlines = Deadlines()
        in_flight, settings = options.in_flight, options.settings
        self.arrivals = in_flight.caller_waits("max_receive_s", settings.max_receive_s)
        self.sends = in_flight.caller_waits("max_send_s", settings.max_send_s)
        self._path = unix_path(settings.listen)
        self._listeners: list[asyncio.Server] = []
        self._is_empty: asyncio.Event | None = None

    async def listen(self) -> int:
        settings = self.options.settings
        try:
            sockets = [_bind_path(self._path)] if self._path else _bind_port(settings.listen, self.options.shares_port)
        except OSError as error:
            problem = error.strerror if error.errno and not isinstance(error, socket.gaierror) else "no such address"
            raise SetupError(f"cannot listen on {settings.listen}: {problem}") from error
        self.options.in_flight.meters.gauge(Metrics.CONNECTIONS, lambda: len(self.connections), "grpc")
        secure: dict[str, Any] = {}
        if self.options.tls and not self._path:
            secure = {
                "ssl": self.options.tls.h2_context,
                "ssl_handshake_timeout": settings.max_handshake_s,
                "ssl_shutdown_timeout": TLS_CLOSE_S,
            }
        loop = asyncio.get_running_loop()
        serve = loop.create_unix_server if self._path else loop.create_server
        for one in sockets:
            make = partial(_ServerConnection, self)
            self._listeners.append(await serve(make, sock=one, backlog=_BACKLOG, **secure))
        return 0 if self._path else int(sockets[0].getsockname()[1])

    def ask_to_leave(self) -> bool:
        for connection in list(self.connections):
            connection.ask_to_leave()
        return True

    def take_no_more(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            for listener in self._listeners:
                listener.close()
            if self._path and self._listeners:
                Path(self._path).unlink(missing_ok=True)
        self.ask_to_leave()

    async def stop(self, grace_s: float) -> None:
        self.take_no_more()
        if self.connections:
            self._is_empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), grace_s)
        for connection in list(self.connections):
            connection.abort()

    def lost(self, connection: _ServerConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if self._is_empty and not self.connections:
            self._is_empty.set()

    def count_ended(self, limit: str) -> None:
        """A connection is ended for a limit."""
        self.options.in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", limit).add()


def _bind_port(address: str, shares_port: bool) -> list[socket.socket]:
    """Sockets of all addresses of a host's name, on one port. Raises OSError."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            sockets.append(one := socket.socket(family, kind, protocol))
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6 and len(found) == 1:  # [::] takes callers of both families
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            number = int(port) or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            one.bind((where[0], number, *where[2:]))
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def _bind_path(path: str) -> socket.socket:
    """A socket at a path, in place of one that a killed process has left behind. Raises OSError."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(False)
    try:
        if Path(path).is_socket() and not is_listened_on(path):
            Path(path).unlink()
        one.bind(path)
    except BaseException:
        one.close()
        raise
    return one


def _peer(name: Any) -> str:
    """A connection's other end as gRPC writes it."""
    if not isinstance(name, tuple):
        return "unix:"
    host = name[0].partition("%")[0]
    return f"ipv6:%5B{host}%5D:{name[1]}" if ":" in host else f"ipv4:{host}:{name[1]}"


def _names(tls: ssl.SSLObject | None) -> tuple[str, ...]:
    shown: Any = tls and tls.getpeercert()
    if not shown:
        return ()
    names = shown.get("subjectAltName", ())
    return tuple(str(ip_address(name.strip())) if kind == "IP Address" else name for kind, name in names)


def _timeout_s(value: bytes) -> float:
    """The time of a grpc-timeout. Raises CallEnd."""
    digits, unit_s = value[:-1], _TIMEOUT_UNITS_S.get(value[-1:])
    if unit_s is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        raise CallEnd(INTERNAL, "grpc-timeout: must be up to eight digits and one of H, M, S, m, u, n")
    return int(digits) * unit_s


def _unpacked(value: bytes) -> Iterable[bytes]:
    """The values of a field of binary metadata, several of which may stand in one. Raises CallEnd."""
    for part in value.split(b","):
        try:
            yield base64.b64decode(part.strip() + b"==")
        except ValueError as error:
            raise CallEnd(INTERNAL, "a value of binary metadata is not Base64") from error


def _packed(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    return name.encode(), base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode()
