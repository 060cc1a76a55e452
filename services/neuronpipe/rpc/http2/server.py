"""The server's side of gRPC over HTTP/2: connections of callers with their limits, and the end of connections."""

import asyncio
import contextlib
import ssl
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from typing import Any, ClassVar

from google.rpc.code_pb2 import UNIMPLEMENTED
from ngh2 import Role
from ngh2.events import PingAcknowledged, RequestReceived, SettingsAcknowledged, TrailersReceived

from neuronpipe.core.deadlines import Deadlines
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.paced_input import LoopTurns, PacedInput
from neuronpipe.platform.process.receiving_budget import UNCOUNTED_BYTES
from neuronpipe.rpc.http2.call import Http2Call, NotGrpc
from neuronpipe.rpc.http2.connection import (
    ENHANCE_YOUR_CALM,
    LOST,
    NO_ERROR,
    OPEN,
    Http2Connection,
    Keepalive,
    goaway,
)
from neuronpipe.rpc.http2.leaving import HOLD_S, MAX_HOLD_S, Leaving, Phase
from neuronpipe.rpc.http2.stream import ENCODINGS
from neuronpipe.rpc.http2.unread import Unread, UnreadAnswers
from neuronpipe.rpc.transport import CallEnd, ServerOptions, end_of

_DRAIN_PING = b"drain\0\0\0"
_KEEPALIVE_S, _PING_LIMIT_S = 30.0, 10.0
# After a refusal for load, the server does not read the connection for this time, so that many refusals share a turn of
# the event loop. At 16 times the capacity of a server, turns cost more than refusals.
_REST_S = 0.002
# The limits for which the server ends connections: settings, and "protocol" for bytes that are no HTTP/2.
_LIMITS = (
    "max_connections",
    "max_handshake_s",
    "max_connection_idle_s",
    "max_connection_age_grace_s",
    "max_send_s",
    "protocol",
)


class _ServerConnection(Http2Connection[Http2Call]):
    """The connection of a caller. `leaving`: the steps in which the server ends it without losing a call."""

    role = Role.SERVER

    def __init__(self, server: "Http2Server") -> None:
        super().__init__(Keepalive(_KEEPALIVE_S, _PING_LIMIT_S), server.options.settings.max_connection_calls)
        self._server = server
        self.options = server.options
        self.deadlines = server.deadlines
        self.settings = {3: self.options.settings.max_connection_calls, 6: self.options.settings.max_header_bytes}
        self.idle_since_s = 0.0
        self.leaving = Leaving()
        self._is_greeted = False
        # Calls that were answered before the caller ended its side.
        self._answered_early: set[Http2Call] = set()
        self._unread = UnreadAnswers(str(id(self)), server.sends, server.options.in_flight.unread)
        self._is_resting = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._input = PacedInput(self._server.turns, transport)
        self.peer = _peer(transport.get_extra_info("peername"))
        self.peer_names = _names(transport.get_extra_info("ssl_object"))
        self.idle_since_s = asyncio.get_running_loop().time()
        self._server.listener.handshakes.pop(self, None)
        self._server.connections.add(self)
        super().connection_made(transport)
        if self._server.all_know:
            self.ask_to_leave()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._unread.close()
        self._server.connections.discard(self)
        self._server.note_leaving()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.wait(None, 0, self._end_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.note_read(None)

    def data_received(self, data: bytes) -> None:
        self._input.waiting += data
        self.parse_input()

    def parse_input(self) -> None:
        self._input.parse_by(self)
        if self.state is OPEN:
            self._input.regulate(is_full=self._is_resting or bool(self._input.waiting))
        else:
            self._input.waiting = b""

    def can_parse(self) -> bool:
        return self.state is OPEN and not self._is_resting

    def rest(self) -> None:
        """Stops reading for `_REST_S`, because a call was refused for load."""
        if self.state is OPEN and not self._is_resting:
            self._is_resting = True
            self._input.regulate(is_full=True)
            self._server.rest(self)

    def end_rest(self) -> None:
        """Reads from the connection again."""
        self._is_resting = False
        self.parse_input()

    def _take_call(self, event: RequestReceived) -> None:
        self._input.calls += 1
        self.frames.pay()
        if self.leaving.phase is Phase.ACKNOWLEDGED:
            self.leaving.postpone(self.loop.time())
        call = Http2Call(self.outbox, event.stream_id, self.options.settings.max_message_bytes, connection=self)
        call.is_ended = event.end_stream
        self.streams[event.stream_id] = call
        try:
            self._accept(call, call.read_head(event.headers))
            self.touched.append(call)
        except CallEnd as end:
            call.refuse(end)
        except NotGrpc:
            call.answer_http()

    def _take_trailers(self, event: TrailersReceived) -> None:
        """Ends the caller's side of a call. The fields of a request's trailers mean nothing in gRPC."""
        if call := self.streams.get(event.stream_id):
            call.is_ended = True
            call.wake_reader()
            self.touched.append(call)

    def _take_acknowledgement(self, event: SettingsAcknowledged) -> None:
        self._is_greeted = True

    def _take_pong(self, event: PingAcknowledged) -> None:
        self.take_idle_frame(event)
        if event.opaque_data == _DRAIN_PING and self.leaving.phase in (Phase.NOTICE_GIVEN, Phase.ACKNOWLEDGED):
            self.loop.call_later(self.leaving.acknowledge(self.loop.time()), self._release_answers)
            self.look_at_time()

    takers: ClassVar = {
        **Http2Connection.takers,
        RequestReceived: _take_call,
        TrailersReceived: _take_trailers,
        SettingsAcknowledged: _take_acknowledgement,
        PingAcknowledged: _take_pong,
    }

    def _accept(self, call: Http2Call, path: str) -> None:
        """Passes a call to its method. Raises CallEnd for a head that is refused."""
        if self._server.is_stopping:
            call.refuse_stream()
            return
        method = self.options.find_method(path)
        if method is None:
            raise CallEnd(UNIMPLEMENTED, "Method not found!")
        if call.encoding and call.encoding not in ENCODINGS:
            trailers = (("grpc-accept-encoding", b",".join(ENCODINGS).decode()),)
            raise CallEnd(UNIMPLEMENTED, "grpc-encoding: must be identity, gzip or deflate", trailers)
        call.accept(method)
        if call.deadline_s is not None:
            self.deadlines.add(call, call.deadline_s, call.expire)

    def taken(self, touched: Iterable[Http2Call]) -> None:
        for call in touched:
            if call.refusal:
                call.finish(call.refusal)
            if call.has_sent_end or call.is_closed:
                continue
            if call.task is None and call.can_begin():
                call.begin()
            if call.task is None or call.claim or call.is_claiming:
                call.note_arrival()

    def refuse(self, stream: Http2Call, end: CallEnd) -> None:
        if stream.task and not stream.task.done():
            stream.stop_reading(end)
        else:
            stream.finish(end)

    def stream_closed(self, stream: Http2Call, code: int) -> None:
        stream.close()
        if self._unread.waits:
            self._unread.note_read(stream)
        self._answered_early.discard(stream)
        self.leaving.has_served = True
        if self.leaving.is_asked:
            self.loop.call_soon(self.ask_to_leave)
        if not self.streams:
            self.idle_since_s = self.loop.time()

    def has_ended(self, call: Http2Call) -> None:
        """Notes that a call has queued all bytes of its answer."""
        if not call.is_ended:
            self._answered_early.add(call)
        self.frames.pay()
        self.outbox.note_written(call)

    def flush_if_alone(self) -> None:
        """Flushes at once if one stream is open. If more are open, their bytes may join the same write."""
        if len(self.streams) == 1:
            self.flush()

    def flush(self) -> None:
        if self.leaving.holds_answers:
            return
        super().flush()
        if self.state is OPEN:
            unread, size_bytes = self._unread, self.engine.queued_body_size()
            if size_bytes > UNCOUNTED_BYTES or unread.claim:
                unread.count_bytes(size_bytes, self._make_room)

    def _make_room(self, error: NeuronpipeError) -> None:
        """Ends the stream with most unread bytes, or the connection if the operating system takes no bytes.

        The next flush claims memory for the bytes that remain.
        """
        self._unread.claim = None
        self._server.calls_ended.add()
        size_bytes = self.engine.queued_body_size
        stream = max(self.streams.values(), key=lambda stream: size_bytes(stream.number), default=None)
        self._end_unread(None if self.outbox.is_paused else stream)

    def _end_unread(self, stream: Unread) -> None:
        """Ends a stream whose bytes the caller does not read, or the connection (None)."""
        if stream is None:
            self.end("max_send_s")
        else:
            self.outbox.reset(stream.number, ENHANCE_YOUR_CALM)  # gRPC callers see RESOURCE_EXHAUSTED

    def flushed(self) -> None:
        engine = self.engine
        if self._unread.waits or engine.queued_body_size():
            self._unread.note_flush(engine, self.outbox.written, self._end_unread)
        for call in list(self._answered_early):
            if not engine.queued_body_size(call.number):
                # An earlier RST_STREAM would discard the rest of the answer.
                self._answered_early.discard(call)
                self.outbox.reset(call.number, NO_ERROR)

    def check_time(self, now_s: float) -> float:
        settings, leaving = self.options.settings, self.leaving
        limits_s = [super().check_time(now_s)]

        def is_over(limit_s: float) -> bool:
            limits_s.append(limit_s)
            return now_s >= limit_s

        if not self._is_greeted and is_over(self.made_s + settings.max_handshake_s):
            self.end("max_handshake_s")
        idle_s, age_s = settings.max_connection_idle_s, settings.max_connection_age_s
        idle_since_s = now_s if self.streams else self.idle_since_s
        if idle_s and leaving.phase is Phase.OPEN and is_over(idle_since_s + idle_s):
            self._server.count_ended("max_connection_idle_s")
            self._give_notice()
        if age_s and leaving.phase is Phase.OPEN and is_over(self.made_s + age_s):
            leaving.ends_s = now_s + settings.max_connection_age_grace_s
            self._give_notice()
        if now_s >= leaving.next_s:
            (self._give_notice if leaving.phase is Phase.OPEN else self.take_no_more)()
        if now_s >= leaving.ends_s:
            self.end("max_connection_age_grace_s")
        limits_s += leaving.next_s, leaving.ends_s
        return min((limit_s for limit_s in limits_s if limit_s > now_s), default=now_s)  # none left after `abort`

    def ask_to_leave(self) -> None:
        """Asks the caller to send new calls elsewhere. The server answers the calls that are on their way."""
        if self.leaving.phase is Phase.OPEN and self.state is OPEN:
            self.leaving.ask(self.made_s)
            self.look_at_time()

    def _give_notice(self) -> None:
        # `_send_notice` must not write its own frames into a frame of nghttp2 that is half sent.
        self.leaving.prepare_notice(self.loop.time(), can_hold=self.outbox.is_sent_whole)
        if self.leaving.holds_answers:
            self.loop.call_later(HOLD_S, self._send_notice)
        else:
            self._send_notice()

    def _send_notice(self) -> None:
        if self.leaving.phase is not Phase.NOTICE_DUE or self.state is not OPEN:
            return
        self.leaving.note_notice(self.loop.time())
        if self.leaving.holds_answers:
            self.transport.write(goaway(NO_ERROR) + b"\0\0\x08\x06\0\0\0\0\0" + _DRAIN_PING)
            self.loop.call_later(MAX_HOLD_S, self._release_answers)
        else:
            self.engine.send_shutdown_notice()
            self.flush()  # nghttp2 would send the ping first
            if self.state is not LOST:
                self.ping(_DRAIN_PING)

    def _release_answers(self) -> None:
        if self.leaving.holds_answers:
            self.leaving.holds_answers = False
            self.flush()

    def take_no_more(self) -> None:
        """Takes no more streams. The connection ends with its last stream."""
        if self.leaving.phase < Phase.GOING_AWAY and self.state is OPEN:
            self.leaving.go_away()
            self.engine.send_goaway(NO_ERROR)
            self.outbox.flush_soon()
            self._server.note_leaving()

    def end(self, limit: str) -> None:
        """Ends the connection at once, and counts it under the name of a limit."""
        if self.state is not LOST:
            self._server.count_ended(limit)
            self.abort()

    def failed(self) -> None:
        self._server.count_ended("protocol")


class Http2Server:
    """A gRPC server that listens at one address."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.connections: set[_ServerConnection] = set()
        self.listener = Listener(
            options.settings.listen,
            options.settings,
            connections=self.connections,
            begin=partial(_ServerConnection, self),
            refused=partial(self.count_ended, "max_connections"),
            ended=self.note_leaving,
            tls=options.tls.h2_context if options.tls else None,
            shares_port=options.shares_port,
        )
        self.is_stopping = False
        self.deadlines = Deadlines()
        in_flight, settings = options.in_flight, options.settings
        self.sends = in_flight.caller_waits("max_send_s", settings.max_send_s)
        self.calls_ended = in_flight.meters.counter(Metrics.CALLS_ENDED, "max_send_s")
        # All counters exist from the start: Prometheus sees no increase when a series begins with 1.
        self._ended = {limit: in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", limit) for limit in _LIMITS}
        # Made when the server stops listening, and set when no connection takes more streams.
        self.all_know: asyncio.Event | None = None
        self._is_empty: asyncio.Event | None = None
        self._resting: set[_ServerConnection] = set()
        self.turns = LoopTurns()

    def rest(self, connection: _ServerConnection) -> None:
        """Lets a connection rest: the server reads from it again after `_REST_S`."""
        if not self._resting:
            asyncio.get_running_loop().call_later(_REST_S, self._end_rests)
        self._resting.add(connection)

    def _end_rests(self) -> None:
        resting, self._resting = self._resting, set()
        for connection in resting:
            connection.end_rest()

    def listen(self) -> None:
        """Takes connections from now on, at the listener's bound address. Raises SetupError."""
        self.listener.listen()
        self.options.in_flight.meters.gauge(Metrics.CONNECTIONS, lambda: len(self.connections), "grpc")

    def ask_to_leave(self) -> None:
        """Asks the callers of open connections to send new calls elsewhere, and answers calls that still come."""
        for connection in list(self.connections):
            connection.ask_to_leave()

    async def stop_listening(self, limit_s: float) -> None:
        """Takes no new connections, and asks all callers to leave.

        Returns once all callers know it, or after `limit_s`. Until then the server answers their calls.
        """
        if self.all_know is None:
            self.all_know = asyncio.Event()
            self.listener.close()
            self.ask_to_leave()
            self.note_leaving()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.all_know.wait(), limit_s)

    def take_no_more(self) -> None:
        """Takes no new calls from now on."""
        self.is_stopping = True

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, and ends each connection once its last response was sent, after `grace_s` at most.

        May be called again.
        """
        self.take_no_more()
        await self.stop_listening(0)
        for connection in list(self.connections):  # also connections whose callers did not acknowledge the notice
            connection.take_no_more()
        if self.connections:
            self._is_empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), grace_s)
        self.listener.end_handshakes()
        end = end_of(self.options.in_flight.stopping())
        for connection in list(self.connections):
            for call in list(connection.streams.values()):
                call.finish(end)
            connection.flush()
            connection.close()

    def note_leaving(self) -> None:
        """Wakes `stop_listening` if no connection takes more streams, and `stop` if no connection is left."""
        are_going = (connection.leaving.phase is Phase.GOING_AWAY for connection in self.connections)
        if self.all_know and not self.listener.handshakes and all(are_going):
            self.all_know.set()
        if self._is_empty and not self.connections:
            self._is_empty.set()

    def count_ended(self, limit: str) -> None:
        """Counts a connection that the server ends for a limit."""
        self._ended[limit].add()


def _peer(name: Any) -> str:
    """Returns the other end of a connection, in gRPC's notation."""
    if not isinstance(name, tuple):
        return "unix:"
    host = name[0].partition("%")[0]
    return f"ipv6:%5B{host}%5D:{name[1]}" if ":" in host else f"ipv4:{host}:{name[1]}"


def _names(tls: ssl.SSLObject | None) -> tuple[str, ...]:
    certificate: Any = tls and tls.getpeercert()
    if not certificate:
        return ()
    names = certificate.get("subjectAltName", ())
    return tuple(str(ip_address(name.strip())) if kind == "IP Address" else name for kind, name in names)
