"""The sending side of a connection: from nghttp2, which queues the bytes of all streams, to the transport."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from ngh2 import Connection as Engine
from ngh2 import NGH2Error

from neuronpipe.rpc.http2.frame_budget import FrameBudget

# Bytes that the transport gets at once, and above which the transport pauses the outbox.
_WRITE_BYTES = 1 << 18
# A writer waits while more bytes of its stream have not reached the operating system.
_MAX_QUEUED_BYTES = 1 << 18


class Sender(Protocol):
    """A stream that sends. `put_bytes`: number of bytes that were ever queued."""

    number: int
    put_bytes: int


class Outbox:
    """The queued bytes of a connection, and the writers that wait for room.

    - `is_paused`: the transport takes no bytes.
    - `is_sent_whole`: the transport got whole frames only.
    - `written`: the streams that have queued bytes since the last flush.
    - `waiting`: the writers that wait, by the numbers of their streams.
    """

    def __init__(
        self, engine: Engine, transport: asyncio.Transport, frames: FrameBudget, flush: Callable[[], None]
    ) -> None:
        """`flush`: calls `send`, and handles the events that nghttp2 then has."""
        transport.set_write_buffer_limits(high=_WRITE_BYTES, low=_WRITE_BYTES // 4)
        self.engine = engine
        self.is_paused, self.is_sent_whole = False, True
        self.written: set[Sender] = set()
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self._transport, self._frames, self._flush = transport, frames, flush
        self._loop = asyncio.get_running_loop()
        self._is_flush_due = False

    def note_written(self, stream: Sender) -> None:
        """Notes that a stream has queued a message or its end."""
        self.written.add(stream)
        self._frames.pay()
        self.flush_soon()

    def reset(self, number: int, code: int) -> None:
        """Ends a stream by RST_STREAM, unless it has just ended."""
        with contextlib.suppress(NGH2Error):
            self.engine.reset_stream(number, code)
        self.flush_soon()

    def acknowledge(self, size_bytes: int, number: int) -> None:
        """Lets the peer send another `size_bytes`."""
        try:
            self.engine.acknowledge_received_data(size_bytes, number)
        except (NGH2Error, ValueError):  # the stream or the connection has just ended
            return

    def flush_soon(self) -> None:
        """Flushes at the end of this turn of the event loop, so that the bytes of many streams travel together."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_if_due)

    def _flush_if_due(self) -> None:
        if self._is_flush_due:
            self._is_flush_due = False
            self._flush()

    def send(self) -> None:
        """Passes queued bytes to the transport, as far as the peer's windows reach. Raises NGH2Error."""
        engine, self._is_flush_due = self.engine, False
        while not self.is_paused:
            # Little data has no limit, because a limit makes nghttp2 copy bodies once more.
            is_little = engine.queued_body_size() <= _WRITE_BYTES
            data = engine.data_to_send(None if is_little else _WRITE_BYTES)
            if data:
                self._frames.pay_by_bytes(len(data))
                self._transport.write(data)
            self.is_sent_whole = is_little or not data
            if self.is_sent_whole:
                return

    def has_room(self, number: int) -> bool:
        """Returns whether all queued bytes of a stream can be sent now, which depends on how fast the peer reads."""
        engine = self.engine
        return not self.is_paused and engine.queued_body_size(number) <= min(
            _MAX_QUEUED_BYTES, engine.stream_remote_window_size(number), engine.remote_window_size
        )

    async def wait_for_room(self, number: int) -> None:
        """Returns once a stream has room, or is over."""
        waiting = self.waiting[number] = self._loop.create_future()
        await waiting

    def wake_writers(self) -> None:
        """Wakes the writers whose streams have room."""
        for number in list(self.waiting):
            if self.has_room(number):
                self._wake_writer(number)

    def _wake_writer(self, number: int) -> None:
        if (waiting := self.waiting.pop(number, None)) and not waiting.done():
            waiting.set_result(None)

    def forget(self, stream: Sender) -> None:
        """Forgets a stream that is over, and wakes its writer."""
        self.written.discard(stream)
        if self.waiting:
            self._wake_writer(stream.number)

    def close(self) -> None:
        """Ends the cycle of references between the outbox and its connection."""
        self._flush = lambda: None
