"""One HTTP/2 connection (RFC 9113) of a server or a client: bytes of the transport ↔ frames (nghttp2) ↔ streams."""

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Generic, TypeVar

from ngh2 import Configuration, DenialOfServiceError, NGH2Error, Role
from ngh2 import Connection as Engine
from ngh2.events import (
    ConnectionClosed,
    DataReceived,
    GoAwayReceived,
    PingAcknowledged,
    PingReceived,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    WindowUpdated,
)

from neuronpipe.platform.process.running_time import RunningTime
from neuronpipe.rpc.http2.closing import Closing
from neuronpipe.rpc.http2.stream import MessageStream
from neuronpipe.rpc.transport import CallEnd

NO_ERROR, CANCEL, ENHANCE_YOUR_CALM = 0x0, 0x8, 0xB  # RFC 9113, 7

# Bytes that a peer may send in one stream before we acknowledge any. The window of the connection is the largest of
# HTTP/2: streams that are not read would use up a smaller window, and stop all other streams. The receiving budget
# bounds the memory.
_STREAM_WINDOW_BYTES = 1 << 20
_CONNECTION_WINDOW_BYTES = (1 << 31) - 1
# Bytes that are passed to the transport at once, and above which the transport asks writers to wait.
_WRITE_BYTES = 1 << 18
# Largest header list that reaches us: 16 times the limit that our SETTINGS announce, so that a call is refused for its
# own metadata. nghttp2 ends the connection for a longer list: skipping it would break the compression of later heads.
_MAX_HEADER_LIST_BYTES = 1 << 18
_MAX_HEADERS = 1 << 12
# Frames that bring nothing: PING, SETTINGS, WINDOW_UPDATE, GOAWAY, empty DATA, and RST_STREAM of a call that is over. A
# peer may send a burst of the first number, and then the second number per second. More end the connection.
_IDLE_FRAMES = (500, 100)
_IDLE_KINDS = frozenset((WindowUpdated, SettingsReceived, PingReceived, PingAcknowledged, GoAwayReceived))
# Calls and data pay for more idle frames: gRPC's C core sends two WINDOW_UPDATE for each message that it waits for,
# readers send them for bytes that they have read, and clients measure round trips by PING. Each call, each message and
# each DATA frame of the peer pays for PAID_FRAMES idle frames, and each 256 bytes that we send for one idle frame. At
# most _MAX_PAID_FRAMES are kept for later.
PAID_FRAMES, _MAX_PAID_FRAMES = 4, 10_000
_PAID_BITS = 8
# A peer may reset this number of calls per second, or as many as it may have open if that is more, and twice as many
# at once. All calls of a connection may reach their deadlines together, and then the calls that replaced them. Rapid
# resets (CVE-2023-44487) exceed this.
_MIN_RESETS = 2048
_MAX_CONTINUATIONS = 64
_CONFIGURATION: Mapping[str, Any] = {
    "auto_window_update": False,
    "max_inbound_header_list_size": _MAX_HEADER_LIST_BYTES,
    "max_inbound_header_count": _MAX_HEADERS,
    "max_continuations": _MAX_CONTINUATIONS,
    # `_resets` counts resets instead of nghttp2, which also counts resets of calls that are over.
    "stream_reset_rate_limit": (1 << 62, 0),
}
_KEEPALIVE_PING = b"alive\0\0\0"

StreamT = TypeVar("StreamT", bound=MessageStream)


class State(IntEnum):
    """The states of a connection, in their order."""

    OPEN = 0
    CLOSING = 1  # no frame is read or queued any more, and the transport still sends its bytes
    LOST = 2


# Names of the module, because Python 3.11 takes ten times as long to find a member of an enumeration.
OPEN, CLOSING, LOST = State


@dataclass(slots=True, eq=False)
class Keepalive:
    """The times of pings: a peer that is silent for `silence_s` is pinged, and has `answer_s` to send anything."""

    silence_s: float
    answer_s: float
    _unanswered: RunningTime | None = None

    def check(self, now_s: float, received_s: float, ping: Callable[[bytes], None]) -> float:
        """Pings a silent peer. Returns the time of the next check, or `now_s` if the peer has not answered in time."""
        if now_s - received_s < self.silence_s:
            self._unanswered = None
            return received_s + self.silence_s
        if not self._unanswered:
            self._unanswered = RunningTime(self.answer_s)
            ping(_KEEPALIVE_PING)
        is_late = self._unanswered.look(received_s, now_s) >= self.answer_s
        return now_s if is_late else now_s + self._unanswered.look_s


@dataclass(slots=True, eq=False)
class _Rate:
    """The rate at which a peer sends frames of a kind, as a leaky bucket."""

    burst: float
    per_s: float
    _level: float = 0.0
    _seen_s: float = 0.0

    def count(self, now_s: float) -> None:
        """Counts a frame. Raises DenialOfServiceError if frames flood."""
        self._level = max(0.0, self._level - (now_s - self._seen_s) * self.per_s) + 1
        self._seen_s = now_s
        if self._level > self.burst:
            raise DenialOfServiceError(f"{self.burst} frames, then {self.per_s} a second, the limit")


class Http2Connection(asyncio.Protocol, ABC, Generic[StreamT]):
    """A connection. `streams`: the open streams by their numbers.

    The connection acknowledges received bytes itself, also for streams that are over. Otherwise its window would shrink
    until nothing moves.
    """

    transport: asyncio.Transport
    role: Role
    settings: dict[int, int]

    def __init__(self, keepalive: Keepalive, max_calls: int = 0) -> None:
        """`max_calls`: calls that a peer may have open."""
        self.streams: dict[int, StreamT] = {}
        self.touched: list[StreamT] = []
        self.state, self.is_paused = OPEN, False
        # Set once the peer, or a proxy before it, asks for another connection, and will close this connection.
        self.goaway_received = asyncio.Event()
        self.waiting_writers: set[MessageStream] = set()
        self._keepalive = keepalive
        self._is_flush_due = False
        # Whether the transport was given whole frames only.
        self.is_sent_whole = True
        self._idle_frames, self.paid_frames = _Rate(*_IDLE_FRAMES), 0
        resets = max(max_calls, _MIN_RESETS)
        self._resets = _Rate(2 * resets, resets)
        self._written: set[MessageStream] = set()
        self._timer: asyncio.TimerHandle | Closing | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a stream's; uvloop's is no subclass of asyncio's
        self.loop = asyncio.get_running_loop()
        self.made_s = self.received_s = self.loop.time()
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls and tls.selected_alpn_protocol() != "h2":  # RFC 9113, 3.2
            self.abort()
            return
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.set_write_buffer_limits(high=_WRITE_BYTES, low=_WRITE_BYTES // 4)
        self.engine = Engine(self.role, Configuration(**_CONFIGURATION))
        self.engine.initiate_connection({4: _STREAM_WINDOW_BYTES, **self.settings})
        self.engine.set_local_window_size(_CONNECTION_WINDOW_BYTES)
        self._look_at_time()
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self.state is not OPEN:
            return
        self.received_s = self.loop.time()
        try:
            self.engine.receive_data(data)
            self._handle(self.engine.events())
            if self.engine.want_write and self.state is not LOST:
                self.flush_soon()
        except NGH2Error as error:
            self._fail(error)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.flush_soon()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.state = LOST
        if self._timer:
            self._timer.cancel()
        for stream in list(self.streams.values()):
            self.stream_closed(stream, CANCEL)
        self.streams.clear()
        # The timer and the streams of both sets refer to this connection.
        self._timer = None
        self.waiting_writers.clear()
        self._written.clear()

    def _handle(self, events: Iterable[object]) -> None:
        takers = self.takers
        for event in events:
            kind = type(event)
            if kind in _IDLE_KINDS:
                self._count_idle_frame()
            if take := takers.get(kind):
                take(self, event)
        if self.touched and self.state is not LOST:
            touched, self.touched = self.touched, []
            self.taken(touched)

    def _take_closed_stream(self, event: StreamClosed) -> None:
        if stream := self.streams.pop(event.stream_id, None):
            self._written.discard(stream)
            self.stream_closed(stream, event.error_code)

    def _take_reset(self, event: StreamReset) -> None:
        if event.stream_id in self.streams:
            self._resets.count(self.received_s)
        else:
            self._count_idle_frame()

    def take_window(self, event: object) -> None:
        """Sends the waiting bytes for which the peer has made its window larger."""
        if self.waiting_writers:
            self.flush_soon()

    def _take_goaway(self, event: GoAwayReceived) -> None:
        self.goaway_received.set()

    def _take_end(self, event: ConnectionClosed) -> None:
        if event.error_code and not self.goaway_received.is_set():
            self.failed()
        self.close()

    def _take_data(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        data = event.data
        if stream is None or stream.ignores_data:
            if data:
                self.acknowledge(len(data), event.stream_id)
                if stream:
                    stream.ignore()
        elif data:
            self.paid_frames += PAID_FRAMES
            try:
                stream.receive(data)
            except CallEnd as end:
                self.refuse(stream, end)
        elif not event.end_stream:
            self._count_idle_frame()
        if stream:
            self.touched.append(stream)
            if event.end_stream:
                stream.is_ended = True
                stream.wake_reader()

    def _count_idle_frame(self) -> None:
        if self.paid_frames:
            self.paid_frames -= 1
        else:
            self._idle_frames.count(self.received_s)

    # The function that takes each kind of event. Other events mean nothing here.
    takers: ClassVar[Mapping[type[object], Callable[[Any, Any], None]]] = {
        DataReceived: _take_data,
        StreamClosed: _take_closed_stream,
        StreamReset: _take_reset,
        WindowUpdated: take_window,
        SettingsReceived: take_window,
        GoAwayReceived: _take_goaway,
        ConnectionClosed: _take_end,
    }

    def taken(self, touched: Iterable[StreamT]) -> None:
        """Handles the streams that got something (`touched`), once all events of a read were taken."""

    @abstractmethod
    def refuse(self, stream: StreamT, end: CallEnd) -> None:
        """Ends a stream on which the peer sent something that is not accepted."""

    def stream_closed(self, stream: StreamT, code: int) -> None:
        """Ends a stream that is over. `code`: the error code of RST_STREAM, or 0."""
        stream.close()

    def acknowledge(self, size_bytes: int, number: int) -> None:
        """Lets the peer send another `size_bytes`."""
        if self.state is not LOST:
            try:
                self.engine.acknowledge_received_data(size_bytes, number)
            except (NGH2Error, ValueError):  # the stream or the connection has just ended
                return

    def has_written(self, stream: MessageStream) -> None:
        """Notes that a stream has queued bytes."""
        self._written.add(stream)
        self.paid_frames += PAID_FRAMES
        self.flush_soon()

    def flush_soon(self) -> None:
        """Sends the queued bytes at the end of this turn of the event loop, so that many travel together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        if self._is_flush_due:
            self.flush()

    def flush(self) -> None:
        """Sends the queued bytes that the peer's windows let through."""
        self._is_flush_due = False
        if self.state is not OPEN:
            return
        engine = self.engine
        try:
            while not self.is_paused:
                # A limit makes nghttp2 copy bodies once more.
                is_little = engine.queued_body_size() <= _WRITE_BYTES
                data = engine.data_to_send(None if is_little else _WRITE_BYTES)
                if data:
                    self.paid_frames = min(self.paid_frames + (len(data) >> _PAID_BITS), _MAX_PAID_FRAMES)
                    self.transport.write(data)
                self.is_sent_whole = is_little or not data
                if is_little or not data:
                    break
            if events := engine.events():
                self._handle(events)
        except NGH2Error as error:
            self._fail(error)
            return
        if not (self.state is LOST or self.is_paused):
            self.flushed(self._written)
            self._written.clear()
            if self.waiting_writers:
                for stream in list(self.waiting_writers):
                    if stream.is_closed or stream.has_room():
                        self.waiting_writers.discard(stream)
                        stream.wake_writer()

    def flushed(self, written: Iterable[MessageStream]) -> None:
        """Runs after a flush. `written`: the streams that had queued bytes."""

    def _look_at_time(self) -> None:
        """Checks all limits by one timer, because most connections reach no limit."""
        self._timer = None
        due_s = self.check_time(self.loop.time())
        if due_s is not None and self.state is not LOST:
            self._timer = self.loop.call_at(due_s, self._look_at_time)

    def look_at_time_soon(self) -> None:
        """Checks the limits now, because one of them may have come nearer."""
        if self._timer:
            self._timer.cancel()
        if self.state is not LOST:
            self._look_at_time()

    def check_time(self, now_s: float) -> float | None:
        """Acts on the limits that were reached. Returns the time of the next check; None if the connection is over."""
        due_s = self._keepalive.check(now_s, self.received_s, self.ping)
        if due_s > now_s:
            return due_s
        self.abort()
        return None

    def ping(self, data: bytes) -> None:
        """Sends a ping of eight bytes, which the peer sends back."""
        self.engine.ping(data)
        self.flush()

    def _fail(self, error: NGH2Error) -> None:
        """Ends the connection after an error of nghttp2, which then sends no GOAWAY itself."""
        if self.state is not OPEN:
            return
        code = ENHANCE_YOUR_CALM if isinstance(error, DenialOfServiceError) else 0x1
        self.transport.write(goaway(code))
        self.failed()
        self.close()

    def failed(self) -> None:
        """Notes that the peer broke the protocol, or reached a limit of frames."""

    def close(self) -> None:
        """Ends the connection. Bytes that the transport already has are still sent."""
        if self.state is not OPEN:
            return
        self.state = CLOSING
        for stream in list(self.streams.values()):
            self.stream_closed(stream, CANCEL)
        self.streams.clear()
        if self._timer:
            self._timer.cancel()
        try:
            self._timer = Closing(self.transport, self.abort)
        except OSError:  # the peer has gone
            self.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        self.state = LOST
        self.transport.abort()


def goaway(code: int) -> bytes:
    """Returns the frame GOAWAY that leaves the peer all its streams."""
    return b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff" + code.to_bytes(4, "big")
