"""The server's side of gRPC over HTTP/2: connections of callers, with their limits, and the end of both."""

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from typing import Any

from ngh2 import NGH2Error, Role
from ngh2.events import RequestReceived, SettingsAcknowledged, TrailersReceived

from neuronpipe.core.background import LoopTurns
from neuronpipe.core.deadlines import Deadlines
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.receiving_budget import Claim
from neuronpipe.rpc.http2.call import Call, NotGrpc
from neuronpipe.rpc.http2.connection import NO_ERROR, Connection, goaway
from neuronpipe.rpc.http2.stream import ENCODINGS, UNIMPLEMENTED, Stream
from neuronpipe.rpc.transport import CallEnd, ServerOptions, end_of

_DRAIN_PING = b"drain\0\0\0"
# Callers begin calls when they get answers, and gRPC whose retries are turned off fails those that begin as the notice
# comes: answers wait for this time before it, and after it was acknowledged, at most for the second.
_HOLD_S, _MAX_HOLD_S = 0.02, 0.1
# A peer that does not acknowledge the notice gets no longer; streams that it opened are answered all the same.
_NOTICE_LIMIT_S = 5.0
# After the notice was acknowledged, and after each stream that comes then: this time, or that of this many round trips
# of the notice. A caller's library may acknowledge it before its calls know: Node.js opens streams for some
# milliseconds more, or as long as the processor is taken from it, and gRPC's client there repeats a refused call once.
_DRAIN_S, _DRAIN_ROUND_TRIPS = 0.2, 4
# A new connection is asked to leave after its first call, or this time: gRPC fails the calls for which it was made, if
# it is asked before they begin.
_FIRST_CALL_S = 0.25
_KEEPALIVE_S = 30.0
# A connection with a call that was refused for load is not read for this time, so that refusals of many calls share
# their turns of the event loop: at sixteen times the load that can be borne, turns would cost more than the refusals.
_REST_S = 0.002
# What comes is looked at in pieces of this size, or larger ones while no call begins.
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 10, 16 << 10
# Of answers that a caller has not read, those that do not count.
_UNCOUNTED_UNREAD_BYTES = 64 << 10
# What connections are ended for: settings, and what is no HTTP/2.
_LIMITS = (
    "max_connections",
    "max_handshake_s",
    "max_connection_idle_s",
    "max_connection_age_grace_s",
    "max_send_s",
    "protocol",
)


class _ServerConnection(Connection[Call]):
    """A caller's connection.

    A stop has three steps: the notice, a GOAWAY that leaves the caller its streams of this moment and those on their
    way; a moment after a ping has come back, a GOAWAY that takes no more; and the end, once all streams are over.
    """

    role = Role.SERVER

    def __init__(self, server: "Http2Server") -> None:
        super().__init__(_KEEPALIVE_S)
        self._server = server
        self.options = server.options
        self.deadlines = server.deadlines
        self.settings = {3: self.options.settings.max_connection_calls, 6: self.options.settings.max_header_bytes}
        self.idle_since_s = 0.0
        self._is_greeted = self.takes_no_more = False
        # Streams that were answered before the caller had sent all.
        self._answered_early: set[Call] = set()
        # What the caller has not read: of each stream the number of the wait, and the bytes that it must read until the
        # wait is over. None is the connection itself, while the operating system takes nothing.
        self._unread: dict[Stream | None, tuple[int, int]] = {}
        self._unread_claim: Claim | None = None
        self._has_served = self._is_resting = False
        # Of all time; and what has come, and waits for a turn.
        self._calls, self._held = 0, b""
        self._is_asked_at_s = self._leaves_at_s = self._ends_at_s = math.inf
        # Of the notice: when it was given, and how long no stream may come once it is acknowledged.
        self._notice_s = self._drain_s = 0.0
        self._holds_answers = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
        for stream in list(self._unread):
            self._is_read(stream)
        self._claim_unread(0)
        self._server.lost(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(None, 0)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read(None)

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        turns, calls, begin, size, began_s = self._server.turns, 0, 0, _PIECE_BYTES, time.monotonic()
        while begin < len(data) and not self._is_resting and turns.has_room_after(calls, began_s):
            before = self._calls
            super().data_received(data[begin : begin + size])
            begin, new = begin + size, self._calls - before
            if new:
                calls, size = calls + new, _PIECE_BYTES
            else:
                size = min(2 * size, _MAX_PIECE_BYTES)
        turns.take(calls, began_s)
        if begin < len(data) and not (self.is_lost or self.is_closing):
            self._held = data[begin:]
            self.transport.pause_reading()
            if not self._is_resting:
                turns.wait(self.go_on)

    def go_on(self) -> None:
        """Takes what has waited, and reads again."""
        if self._is_resting or self.is_lost or self.is_closing:
            return
        held, self._held = self._held, b""
        self.data_received(held)
        if not self._held and not self._is_resting and not self.transport.is_closing():
            self.transport.resume_reading()

    def rest(self) -> None:
        """A call is refused for load."""
        if not (self._is_resting or self.is_lost or self.is_closing):
            self._is_resting = True
            self.transport.pause_reading()
            self._server.rest(self)

    def end_rest(self) -> None:
        """Reads again."""
        self._is_resting = False
        self.go_on()

    def take(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            self._calls += 1
            if self._drain_s:
                self._leave_soon()
            call = Call(self, event.stream_id, self.options.settings.max_message_bytes)
            call.is_ended = event.end_stream
            self.streams[event.stream_id] = call
            try:
                self._accept(call, call.read_head(event.headers))
                self.touched.append(call)
            except CallEnd as end:
                call.refuse(end)
            except NotGrpc:
                call.answer_http()
        elif isinstance(event, SettingsAcknowledged):
            self._is_greeted = True
        elif isinstance(event, TrailersReceived) and (stream := self.streams.get(event.stream_id)):
            # Their fields mean nothing in gRPC.
            stream.is_ended = True
            stream.wake_reader()
            self.touched.append(stream)

    def _accept(self, call: Call, path: str) -> None:
        """Lets a call arrive, or refuses it by its head. Raises CallEnd."""
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

    def taken(self, touched: Iterable[Call]) -> None:
        for call in touched:
            if call.refusal:
                call.finish(call.refusal)
            if call.has_sent_end or call.is_closed:
                continue
            if call.task is None and call.can_begin():
                call.begin()
            if call.task is None or call.claim or call.is_claiming:
                call.note_arrival()

    def refuse(self, stream: Call, end: CallEnd) -> None:
        if stream.task and not stream.task.done():
            stream.stop_reading(end)
        else:
            stream.finish(end)

    def stream_closed(self, stream: Call, code: int) -> None:
        stream.close()
        self._is_read(stream)
        self._answered_early.discard(stream)
        self._has_served = True
        if self._is_asked_at_s < math.inf:
            self.loop.call_soon(self.ask_to_leave)
        if not self.streams:
            self.idle_since_s = self.loop.time()

    # --- what goes ---

    def has_ended(self, call: Call) -> None:
        """A call has queued all that it sends."""
        if not call.is_ended:
            self._answered_early.add(call)
        self.has_written(call)

    def flush_if_alone(self) -> None:
        """Sends at once where there is nothing that could travel along."""
        if len(self.streams) == 1:
            self.flush()

    def flush(self) -> None:
        if self._holds_answers:
            return
        super().flush()
        if not (self.is_lost or self.is_closing):
            self._claim_unread(self.engine.queued_body_size())

    def _claim_unread(self, size_bytes: int) -> None:
        unread, claim = self.options.in_flight.unread, self._unread_claim
        if size_bytes > _UNCOUNTED_UNREAD_BYTES:
            claim = self._unread_claim = claim or Claim(str(id(self)), lambda error: self.end("max_send_s"))
            if size_bytes > claim.bytes:
                unread.grow(claim, size_bytes)
        elif claim:
            self._unread_claim = None
            unread.end(claim)

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
                self._give_notice()
        elif settings.max_connection_idle_s and not self._is_leaving:
            limits.append(now_s + settings.max_connection_idle_s)
        if settings.max_connection_age_s and not self._is_leaving:
            limits.append(self.made_s + settings.max_connection_age_s)
            if now_s >= self.made_s + settings.max_connection_age_s:
                self._ends_at_s = now_s + settings.max_connection_age_grace_s
                self._give_notice()
        if now_s >= self._is_asked_at_s:
            self._is_asked_at_s = math.inf
            self._give_notice()
        if now_s >= self._leaves_at_s:
            self._take_no_more()
        if now_s >= self._ends_at_s:
            self.end("max_connection_age_grace_s")
        if self.is_lost:
            return None
        limits += [self._is_asked_at_s, self._leaves_at_s, self._ends_at_s]
        return min(limit for limit in limits if limit and limit > now_s)

    @property
    def _is_leaving(self) -> bool:
        return self._leaves_at_s < math.inf or self.takes_no_more

    def ask_to_leave(self) -> None:
        """Asks the caller to send new calls elsewhere. Those on their way are answered."""
        if not (self._is_leaving or self.is_lost or self.is_closing):
            self._is_asked_at_s = 0.0 if self._has_served else self.made_s + _FIRST_CALL_S
            self.look_at_time_soon()

    def _give_notice(self) -> None:
        self._leaves_at_s = self.loop.time() + _HOLD_S + _NOTICE_LIMIT_S
        # What follows a part of a frame is no frame.
        self._holds_answers = self.is_sent_whole
        if self._holds_answers:
            self.loop.call_later(_HOLD_S, self._say_notice)
        else:
            self._say_notice()

    def _say_notice(self) -> None:
        if self.takes_no_more or self.is_lost or self.is_closing:
            return
        self._notice_s = self.loop.time()
        if self._holds_answers:
            self.transport.write(goaway(NO_ERROR) + b"\0\0\x08\x06\0\0\0\0\0" + _DRAIN_PING)
            self.loop.call_later(_MAX_HOLD_S, self._release_answers)
        else:
            self.engine.send_shutdown_notice()
            self.flush()  # nghttp2 would send the ping first
            if not self.is_lost:
                self.ping(_DRAIN_PING)

    def _release_answers(self) -> None:
        if self._holds_answers:
            self._holds_answers = False
            self.flush()

    def ping_acknowledged(self, data: bytes) -> None:
        if data == _DRAIN_PING and self._notice_s and not self.takes_no_more:
            round_trip_s = self.loop.time() - self._notice_s
            self.loop.call_later(max(_HOLD_S, round_trip_s), self._release_answers)
            self._drain_s = max(_DRAIN_S, _DRAIN_ROUND_TRIPS * round_trip_s)
            self._leave_soon()
            self.look_at_time_soon()

    def _leave_soon(self) -> None:
        if not self.takes_no_more:
            self._leaves_at_s = min(self.loop.time() + self._drain_s, self._notice_s + _NOTICE_LIMIT_S)

    def _take_no_more(self) -> None:
        """Ends the connection with its last stream."""
        if not (self.takes_no_more or self.is_lost or self.is_closing):
            self.takes_no_more, self._leaves_at_s, self._holds_answers = True, math.inf, False
            self.engine.send_goaway(NO_ERROR)
            self.flush_soon()
            self._server.note_leaving()

    def end(self, limit: str) -> None:
        """Ends the connection at once, as the setting of this name says."""
        if not self.is_lost:
            self._server.count_ended(limit)
            self.abort()

    def failed(self) -> None:
        self._server.count_ended("protocol")


class Http2Server:
    """Listens at one address."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.connections: set[_ServerConnection] = set()
        self.listener = Listener(
            options.settings.listen,
            options.settings,
            self.connections,
            partial(_ServerConnection, self),
            partial(self.count_ended, "max_connections"),
            self.note_leaving,
            tls=options.tls.h2_context if options.tls else None,
            shares_port=options.shares_port,
        )
        self.is_stopping = False
        self.deadlines = Deadlines()
        in_flight, settings = options.in_flight, options.settings
        self.sends = in_flight.caller_waits("max_send_s", settings.max_send_s)
        # A rate from nothing to one is none.
        self._ended = {limit: in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", limit) for limit in _LIMITS}
        # Once it listens no more: set while all connections take no more.
        self.all_know: asyncio.Event | None = None
        self._is_empty: asyncio.Event | None = None
        self._resting: set[_ServerConnection] = set()
        self.turns = LoopTurns()

    def rest(self, connection: _ServerConnection) -> None:
        """Reads a connection again after a moment."""
        if not self._resting:
            asyncio.get_running_loop().call_later(_REST_S, self._go_on)
        self._resting.add(connection)

    def _go_on(self) -> None:
        resting, self._resting = self._resting, set()
        for connection in resting:
            connection.end_rest()

    def listen(self) -> None:
        """Takes connections from now on. Its listener is bound. Raises SetupError."""
        self.listener.listen()
        self.options.in_flight.meters.gauge(Metrics.CONNECTIONS, lambda: len(self.connections), "grpc")

    def ask_to_leave(self) -> None:
        """Asks the callers of open connections to send new calls elsewhere, and answers those that still come."""
        for connection in list(self.connections):
            connection.ask_to_leave()

    async def stop_listening(self, limit_s: float) -> None:
        """Takes no new connections, and asks all callers to leave. Returns once they know it, or after the limit; until
        then their calls are answered.
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
        """Takes no new calls, and ends connections once their last responses have been sent, after `grace_s` at most.

        May be called again.
        """
        self.take_no_more()
        await self.stop_listening(0)
        for connection in list(self.connections):  # those that did not acknowledge the notice, too
            connection._take_no_more()
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
        """One more connection takes no more, or has ended."""
        if self.all_know and not self.listener.handshakes and all(one.takes_no_more for one in self.connections):
            self.all_know.set()
        if self._is_empty and not self.connections:
            self._is_empty.set()

    def lost(self, connection: _ServerConnection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        self.note_leaving()

    def count_ended(self, limit: str) -> None:
        """A connection is ended for a limit."""
        self._ended[limit].add()


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
