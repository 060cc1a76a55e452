"""A connection of HTTP/2 (RFC 9113) at a server or a client: nghttp2 parses the bytes, and streams take the events."""

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
from neuronpipe.rpc.http2.frame_budget import FrameBudget
from neuronpipe.rpc.http2.outbox import Outbox
from neuronpipe.rpc.http2.stream import MessageStream
from neuronpipe.rpc.transport import CallEnd

NO_ERROR, CANCEL, ENHANCE_YOUR_CALM = 0x0, 0x8, 0xB  # RFC 9113, 7

# Bytes of one stream that a peer may send before we acknowledge any. The connection has the largest window of HTTP/2,
# because unread streams would use up a smaller window and stop all other streams. The receiving budget bounds the
# memory.
_STREAM_WINDOW_BYTES = 1 << 20
_CONNECTION_WINDOW_BYTES = (1 << 31) - 1
# Largest header list that nghttp2 decodes: 16 times the limit in our SETTINGS, so that large metadata end only their
# call. A longer list ends the connection: nghttp2 cannot skip it, because later heads are compressed relative to it.
_MAX_HEADER_LIST_BYTES = 1 << 18
_MAX_HEADERS = 1 << 12
_MAX_CONTINUATIONS = 64
_CONFIGURATION: Mapping[str, Any] = {
    "auto_window_update": False,
    "max_inbound_header_list_size": _MAX_HEADER_LIST_BYTES,
    "max_inbound_header_count": _MAX_HEADERS,
    "max_continuations": _MAX_CONTINUATIONS,
    # No limit: FrameBudget counts resets, because nghttp2 also counts resets of calls that are over.
    "stream_reset_rate_limit": (1 << 62, 0),
}
_KEEPALIVE_PING = b"alive\0\0\0"

StreamT = TypeVar("StreamT", bound=MessageStream)


class State(IntEnum):
    """The states of a connection, in their order."""

    OPEN = 0
    CLOSING = 1  # frames are neither read nor queued, and the transport sends the bytes that it has
    LOST = 2


# Python 3.11 finds a name of the module ten times as fast as a member of an enumeration.
OPEN, CLOSING, LOST = State


@dataclass(slots=True, eq=False)
class Keepalive:
    """The pings of a connection. A peer that is silent for `silence_s` is pinged, and must send within `answer_s`."""

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


class Http2Connection(asyncio.Protocol, ABC, Generic[StreamT]):
    """A connection.

    - `streams`: the open streams by their numbers.
    - `touched`: the streams that got something in this read.
    - `goaway_received`: set once the peer, or a proxy before it, asks for another connection.

    Bytes of streams that are over are acknowledged too. Otherwise the window of the connection would shrink until the
    peer could send nothing.
    """

    transport: asyncio.Transport
    role: Role
    settings: dict[int, int]

    def __init__(self, keepalive: Keepalive, max_calls: int = 0) -> None:
        """`max_calls`: calls that a peer may have open."""
        self.streams: dict[int, StreamT] = {}
        self.touched: list[StreamT] = []
        self.state = OPEN
        self.goaway_received = asyncio.Event()
        self.frames = FrameBudget(max_calls)
        self._keepalive = keepalive
        self._timer: asyncio.TimerHandle | Closing | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.loop = asyncio.get_running_loop()
        self.made_s = self.received_s = self.loop.time()
        self.engine = Engine(self.role, Configuration(**_CONFIGURATION))
        self.outbox = Outbox(self.engine, transport, self.frames, self.flush)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls and tls.selected_alpn_protocol() != "h2":  # RFC 9113, 3.2
            self.abort()
            return
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.engine.initiate_connection({4: _STREAM_WINDOW_BYTES, **self.settings})
        self.engine.set_local_window_size(_CONNECTION_WINDOW_BYTES)
        self.look_at_time()
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self.state is OPEN:
            self.parse(data)

    def parse(self, piece: bytes) -> bool:
        """Takes the events of received bytes. Returns True: the next piece may be larger (`PieceParser`)."""
        self.received_s = self.loop.time()
        try:
            self.engine.receive_data(piece)
            self._handle(self.engine.events())
            if self.engine.want_write and self.state is not LOST:
                self.outbox.flush_soon()
        except NGH2Error as error:
            self._fail(error)
        return True

    def pause_writing(self) -> None:
        self.outbox.is_paused = True

    def resume_writing(self) -> None:
        self.outbox.is_paused = False
        self.outbox.flush_soon()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.state = LOST
        if self._timer:
            self._timer.cancel()
        for stream in list(self.streams.values()):
            self.stream_closed(stream, CANCEL)
        self.streams.clear()
        # The timer and the outbox refer to this connection.
        self._timer = None
        self.outbox.close()

    def _handle(self, events: Iterable[object]) -> None:
        takers = self.takers
        for event in events:
            if take := takers.get(type(event)):
                take(self, event)
        if self.touched and self.state is not LOST:
            touched, self.touched = self.touched, []
            self.taken(touched)

    def _take_closed_stream(self, event: StreamClosed) -> None:
        if stream := self.streams.pop(event.stream_id, None):
            self.stream_closed(stream, event.error_code)

    def _take_reset(self, event: StreamReset) -> None:
        if event.stream_id in self.streams:
            self.frames.resets.count(self.received_s)
        else:
            self.take_idle_frame(event)

    def take_idle_frame(self, event: object) -> None:
        """Counts a frame that brings nothing. Raises DenialOfServiceError if such frames flood."""
        self.frames.count_idle_frame(self.received_s)

    def take_window(self, event: object) -> None:
        """Sends the waiting bytes for which the peer has made its window larger."""
        self.take_idle_frame(event)
        if self.outbox.waiting:
            self.outbox.flush_soon()

    def _take_goaway(self, event: GoAwayReceived) -> None:
        self.take_idle_frame(event)
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
                self.outbox.acknowledge(len(data), event.stream_id)
                if stream:
                    stream.ignore()
        elif data:
            self.frames.pay()
            try:
                stream.receive(data)
            except CallEnd as end:
                self.refuse(stream, end)
        elif not event.end_stream:
            self.take_idle_frame(event)
        if stream:
            self.touched.append(stream)
            if event.end_stream:
                stream.is_ended = True
                stream.wake_reader()

    # The method for each kind of event. Other events are ignored.
    takers: ClassVar[Mapping[type[object], Callable[[Any, Any], None]]] = {
        DataReceived: _take_data,
        StreamClosed: _take_closed_stream,
        StreamReset: _take_reset,
        WindowUpdated: take_window,
        SettingsReceived: take_window,
        PingReceived: take_idle_frame,
        PingAcknowledged: take_idle_frame,
        GoAwayReceived: _take_goaway,
        ConnectionClosed: _take_end,
    }

    def taken(self, touched: Iterable[StreamT]) -> None:
        """Handles the streams that got something in a read, after all events of the read."""

    @abstractmethod
    def refuse(self, stream: StreamT, end: CallEnd) -> None:
        """Ends a stream whose peer sent a message that is too large or malformed."""

    def stream_closed(self, stream: StreamT, code: int) -> None:
        """Ends a stream that is over. `code`: the error code of RST_STREAM, or 0."""
        stream.close()

    def flush(self) -> None:
        """Sends queued bytes, as far as the peer's windows reach."""
        if self.state is not OPEN:
            return
        outbox = self.outbox
        try:
            outbox.send()
            if events := self.engine.events():
                self._handle(events)
        except NGH2Error as error:
            self._fail(error)
            return
        if not (self.state is LOST or outbox.is_paused):
            self.flushed()
            outbox.written.clear()
            if outbox.waiting:
                outbox.wake_writers()

    def flushed(self) -> None:
        """Runs after a flush, before the outbox forgets the streams that have `written`."""

    def look_at_time(self) -> None:
        """Checks all limits, and sets the one timer to the next limit. Runs again when a limit may have come nearer."""
        if self.state is not OPEN:
            return
        if self._timer:
            self._timer.cancel()
        due_s = self.check_time(self.loop.time())
        if self.state is OPEN:
            self._timer = self.loop.call_at(due_s, self.look_at_time)

    def check_time(self, now_s: float) -> float:
        """Acts on the limits that were reached. Returns the time of the next check."""
        due_s = self._keepalive.check(now_s, self.received_s, self.ping)
        if due_s <= now_s:
            self.abort()
        return due_s

    def ping(self, data: bytes) -> None:
        """Sends a ping of eight bytes, which the peer sends back."""
        self.engine.ping(data)
        self.flush()

    def _fail(self, error: NGH2Error) -> None:
        """Ends the connection after an error of nghttp2, with the GOAWAY that nghttp2 then does not send."""
        if self.state is not OPEN:
            return
        code = ENHANCE_YOUR_CALM if isinstance(error, DenialOfServiceError) else 0x1
        self.transport.write(goaway(code))
        self.failed()
        self.close()

    def failed(self) -> None:
        """Notes that the peer broke the protocol, or reached a limit of frames."""

    def close(self) -> None:
        """Ends the connection once the transport has sent the bytes that it has."""
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
    """Returns a frame GOAWAY that ends no stream of the peer."""
    return b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff" + code.to_bytes(4, "big")
