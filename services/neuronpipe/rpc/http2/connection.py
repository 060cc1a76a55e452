"""One HTTP/2 connection (RFC 9113), as both sides have it: bytes of the transport ↔ frames (nghttp2) ↔ streams."""

import asyncio
import contextlib
import fcntl
import socket
import ssl
import termios
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

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

from neuronpipe.platform.process.listener import CLOSE_LIMIT_S
from neuronpipe.rpc.http2.stream import Stream
from neuronpipe.rpc.transport import CallEnd

NO_ERROR, REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 0x0, 0x7, 0x8, 0xB  # RFC 9113, 7

# Bytes that a peer may send before we acknowledge any: of one stream, and of all streams of a connection.
_STREAM_WINDOW_BYTES = 1 << 20
_CONNECTION_WINDOW_BYTES = 16 << 20
# Bytes that are passed to the transport at once, and those at which the transport asks to wait.
_WRITE_BYTES = 1 << 18
# Header lists within this limit reach us, so that one call is refused for its own metadata. nghttp2 ends the connection
# for longer ones.
_MAX_HEADER_LIST_BYTES = 1 << 18
_MAX_HEADERS = 1 << 12
# Frames that bring nothing (PING, SETTINGS, RST_STREAM, empty DATA), since data came or went. A peer that sends
# more ends its connection.
_MAX_IDLE_FRAMES = 500
# Of resets of streams by the peer: a burst, and how many a second. nghttp2's default, 1,000 and 33, ends connections of
# honest callers with short deadlines; without a limit, rapid resets (CVE-2023-44487) would take a core.
_RESET_RATE = (10_000, 2_000)
_MAX_CONTINUATIONS = 64
_CONFIGURATION: Mapping[str, Any] = {
    "auto_window_update": False,
    "max_inbound_header_list_size": _MAX_HEADER_LIST_BYTES,
    "max_inbound_header_count": _MAX_HEADERS,
    "max_continuations": _MAX_CONTINUATIONS,
    "stream_reset_rate_limit": _RESET_RATE,
}
# After our last byte, the peer gets this time to read it and to end its side. What it still sends would otherwise make
# the operating system reset the connection, and the peer lose what it has not read.
_LINGER_S = 1.0
# The peer's time for its close_notify.
TLS_CLOSE_S = 0.5
PING_LIMIT_S = 10.0
_KEEPALIVE_PING = b"alive\0\0\0"

StreamT = TypeVar("StreamT", bound=Stream)


class Connection(asyncio.Protocol, ABC, Generic[StreamT]):
    """A connection. `streams`: those that are open, by their numbers.

    It acknowledges what was received, by hand, also of streams that are over, or else the window of the connection
    would shrink until it stands still.
    """

    transport: asyncio.Transport
    role: Role
    settings: dict[int, int]

    def __init__(self, keepalive_s: float) -> None:
        """`keepalive_s`: without a byte for so long, the peer is asked for a sign of life."""
        self.streams: dict[int, StreamT] = {}
        self.touched: list[StreamT] = []
        self.is_lost = self.is_paused = self.is_closing = self.peer_is_leaving = False
        self.waiting_writers: set[Stream] = set()
        self._keepalive_s = keepalive_s
        self._pinged_s = 0.0
        self._is_flush_due = False
        # Whether all that was given to the transport are whole frames.
        self.is_sent_whole = True
        self._idle_frames = 0
        self._written: set[Stream] = set()
        self._timer: asyncio.TimerHandle | None = None

    # --- what the transport calls ---

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
        if self.is_lost or self.is_closing:
            return
        self.received_s = self.loop.time()
        try:
            self.engine.receive_data(data)
            self._handle(self.engine.events())
            if self.engine.want_write and not self.is_lost:
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
        self.is_lost = True
        if self._timer:
            self._timer.cancel()
        for stream in list(self.streams.values()):
            self.stream_closed(stream, CANCEL)
        self.streams.clear()
        # These keep this connection, too.
        self.waiting_writers.clear()
        self._written.clear()

    # --- what comes ---

    def _handle(self, events: Iterable[object]) -> None:
        has_new_window = False
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                self._take_data(event)  # type: ignore[arg-type]  # mypy does not know `type(event)`
            elif kind is StreamClosed:
                if stream := self.streams.pop(event.stream_id, None):  # type: ignore[attr-defined]
                    self._written.discard(stream)
                    self.stream_closed(stream, event.error_code)  # type: ignore[attr-defined]
            elif kind is PingReceived or kind is StreamReset:
                self._count_idle_frame()
            elif kind is SettingsReceived:
                self._count_idle_frame()
                self.greeted()
                has_new_window = True
            elif kind is PingAcknowledged:
                self.ping_acknowledged(event.opaque_data)  # type: ignore[attr-defined]
            elif kind is GoAwayReceived:
                self.peer_is_leaving = True
            elif kind is ConnectionClosed:
                if event.error_code and not self.peer_is_leaving:  # type: ignore[attr-defined]
                    self.failed()
                self.close()
            elif kind is WindowUpdated:
                has_new_window = True
            else:
                self.take(event)
        if has_new_window and self.waiting_writers:
            self.flush_soon()
        if self.touched and not self.is_lost:
            touched, self.touched = self.touched, []
            self.taken(touched)

    def _take_data(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        data = event.data
        if stream is None or stream.ignores_data:
            if data:
                self.acknowledge(len(data), event.stream_id)
        elif data:
            self._idle_frames = 0
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
        self._idle_frames += 1
        if self._idle_frames > _MAX_IDLE_FRAMES:
            raise DenialOfServiceError(f"{_MAX_IDLE_FRAMES} frames that bring nothing, the limit")

    def greeted(self) -> None:
        """The peer has said how it speaks HTTP/2."""

    def take(self, event: object) -> None:
        """Takes an event that only one side knows."""

    def taken(self, touched: Iterable[StreamT]) -> None:
        """All that came together was taken. `touched`: the streams for which there was something."""

    @abstractmethod
    def refuse(self, stream: StreamT, end: CallEnd) -> None:
        """What the peer sends on a stream cannot be taken."""

    def stream_closed(self, stream: StreamT, code: int) -> None:
        """A stream is over, by the error code of RST_STREAM where there was one."""
        stream.close()

    def acknowledge(self, size_bytes: int, number: int) -> None:
        """Lets the peer send as much again."""
        if not self.is_lost:
            try:
                self.engine.acknowledge_received_data(size_bytes, number)
            except (NGH2Error, ValueError):  # the stream has just ended, or the connection
                return

    # --- what goes ---

    def has_written(self, stream: Stream) -> None:
        """A stream has queued something."""
        self._written.add(stream)
        self._idle_frames = 0
        self.flush_soon()

    def flush_soon(self) -> None:
        """Sends what is queued at the end of this turn of the event loop, so that much travels together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        if self._is_flush_due:
            self.flush()

    def flush(self) -> None:
        """Sends what is queued, and may be sent."""
        self._is_flush_due = False
        if self.is_lost or self.is_closing:
            return
        engine = self.engine
        try:
            while not self.is_paused:
                # With a limit, bodies are copied once more.
                is_little = engine.queued_body_size() <= _WRITE_BYTES
                data = engine.data_to_send(None if is_little else _WRITE_BYTES)
                if data:
                    self.transport.write(data)
                self.is_sent_whole = is_little or not data
                if is_little or not data:
                    break
            if events := engine.events():
                self._handle(events)
        except NGH2Error as error:
            self._fail(error)
            return
        if not (self.is_lost or self.is_paused):
            self.flushed(self._written)
            self._written.clear()
            if self.waiting_writers:
                for stream in list(self.waiting_writers):
                    if stream.is_closed or stream.has_room():
                        self.waiting_writers.discard(stream)
                        stream.wake_writer()

    def flushed(self, written: Iterable[Stream]) -> None:
        """All that the peer's windows let through was sent. `written`: the streams that had queued something."""

    # --- time ---

    def _look_at_time(self) -> None:
        """One timer for all limits: most connections reach none."""
        self._timer = None
        due_s = self.check_time(self.loop.time())
        if due_s is not None and not self.is_lost:
            self._timer = self.loop.call_at(due_s, self._look_at_time)

    def look_at_time_soon(self) -> None:
        """A limit may have come nearer."""
        if self._timer:
            self._timer.cancel()
        if not self.is_lost:
            self._look_at_time()

    def check_time(self, now_s: float) -> float | None:
        """Does what is due, and returns when to look again; None where the connection is over."""
        quiet_s = now_s - self.received_s
        if quiet_s < self._keepalive_s:
            self._pinged_s = 0.0
            return self.received_s + self._keepalive_s
        if not self._pinged_s:
            self._pinged_s = now_s
            self.ping(_KEEPALIVE_PING)
        elif now_s - self._pinged_s >= self.ping_limit_s:
            self.abort()
            return None
        return self._pinged_s + self.ping_limit_s

    ping_limit_s = PING_LIMIT_S

    def ping(self, data: bytes) -> None:
        """Asks the peer for a sign of life, eight bytes that it sends back."""
        self.engine.ping(data)
        self.flush()

    def ping_acknowledged(self, data: bytes) -> None:
        """A ping has come back."""

    # --- the end ---

    def _fail(self, error: NGH2Error) -> None:
        """The engine cannot go on. It says nothing to the peer then, so we do."""
        if self.is_lost or self.is_closing:
            return
        code = ENHANCE_YOUR_CALM if isinstance(error, DenialOfServiceError) else 0x1
        self.transport.write(goaway(code))
        self.failed()
        self.close()

    def failed(self) -> None:
        """The peer has broken the protocol, or a limit."""

    def close(self) -> None:
        """Ends the connection; what was passed to the transport is still sent."""
        if self.is_lost or self.is_closing:
            return
        self.is_closing = True
        for stream in list(self.streams.values()):
            self.stream_closed(stream, CANCEL)
        self.streams.clear()
        has_eof = self.transport.can_write_eof()
        if has_eof:
            try:
                self.transport.write_eof()
            except OSError:  # the peer has gone
                self.abort()
                return
        else:
            self.transport.close()
        if self._timer:
            self._timer.cancel()
        until_s, pause_s = self.loop.time() + CLOSE_LIMIT_S, _LINGER_S if has_eof else TLS_CLOSE_S
        self._timer = self.loop.call_later(pause_s, self._end_once_sent, until_s, pause_s)

    def _end_once_sent(self, until_s: float, pause_s: float) -> None:
        if self.loop.time() >= until_s or _is_sent(self.transport):
            self.abort()
        else:
            self._timer = self.loop.call_later(pause_s, self._end_once_sent, until_s, pause_s)

    def abort(self) -> None:
        """Ends the connection at once."""
        self.is_lost = True
        self.transport.abort()


def goaway(code: int) -> bytes:
    """A GOAWAY that leaves the peer all its streams."""
    return b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff" + code.to_bytes(4, "big")


def _is_sent(transport: asyncio.Transport) -> bool:
    """Whether the peer's system has all bytes. Those that wait below TLS no transport tells, but then the operating
    system has some, too.
    """
    if transport.get_write_buffer_size():
        return False
    with contextlib.suppress(OSError):  # another system than Linux, or the socket has ended
        unsent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return not any(unsent)
    return True
