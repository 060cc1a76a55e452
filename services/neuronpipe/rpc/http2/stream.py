"""The stream of one call: received bytes become messages, and messages become sent bytes, both within bounds.

Each message follows a prefix of five bytes: a flag, which is 1 for a compressed message, and the length (gRPC over
HTTP2, https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import asyncio
import zlib
from collections import deque
from dataclasses import dataclass, field

from google.rpc.code_pb2 import INTERNAL, RESOURCE_EXHAUSTED

from neuronpipe.core.parsing import Truncated, inflate
from neuronpipe.rpc.http2.outbox import Outbox
from neuronpipe.rpc.transport import CallEnd

REFUSED_STREAM = 0x7  # RFC 9113, 7
# While the unread whole messages of a stream are larger, its bytes are not acknowledged. A message counts its bytes and
# the overhead.
_MAX_UNREAD_BYTES = 1 << 18
_MESSAGE_OVERHEAD_BYTES = 128
# Shorter pieces of a message are joined, up to the second size, because a separate piece takes more memory than its
# bytes.
_SMALL_PIECE_BYTES = 1 << 12
_MAX_GATHERED_BYTES = 1 << 18
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
ENCODINGS = (b"identity", *_WINDOW_BITS)


class Deflated(bytes):
    """A message that the peer has compressed."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class MessageStream:
    """The messages of one call in both directions.

    - `messages`: the whole messages that wait to be read, with `unread_bytes`.
    - `is_ended`: the peer has ended its side.
    - `has_sent_end`: we have ended our side.
    - `is_closed`: both sides have ended.
    - `error`: the error that reads raise.
    - `ignores_data`: bytes that still come are dropped.
    - `put_bytes`: number of bytes that were ever queued.
    - `buffered_bytes`: size of the part of a message that has arrived.
    """

    outbox: Outbox
    number: int
    max_message_bytes: int
    encoding: bytes | None = None
    messages: deque[bytes] = field(default_factory=deque)
    unread_bytes: int = 0
    is_ended: bool = False
    has_sent_end: bool = False
    is_closed: bool = False
    error: Exception | None = None
    ignores_data: bool = False
    put_bytes: int = 0
    # The message that arrives: its pieces, without `_offset` bytes of the first piece, and its size (-1 before its
    # prefix).
    _chunks: deque[bytes | bytearray] = field(default_factory=deque)
    _offset: int = 0
    buffered_bytes: int = 0
    _size_bytes: int = -1
    _is_deflated: bool = False
    _held_bytes: int = 0
    _reading: asyncio.Future[None] | None = None

    def receive(self, data: bytes) -> None:
        """Takes bytes from the peer. Raises CallEnd if a message is too large, or breaks gRPC's format."""
        size_bytes = len(data)
        try:
            # The usual case: exactly one whole message.
            if (
                not self.buffered_bytes
                and self._size_bytes < 0
                and size_bytes >= 5
                and not data[0]
                and size_bytes - 5 == int.from_bytes(data[1:5], "big") <= self.max_message_bytes
            ):
                self._add(data[5:])
            else:
                self._gather(data)
        finally:
            if self.unread_bytes > _MAX_UNREAD_BYTES:
                self._held_bytes += size_bytes
            else:
                self.outbox.acknowledge(size_bytes, self.number)
        if self._reading:
            self.wake_reader()

    def _gather(self, data: bytes) -> None:
        if len(data) >= _SMALL_PIECE_BYTES:
            self._chunks.append(data)
        elif self._chunks and isinstance(last := self._chunks[-1], bytearray) and len(last) < _MAX_GATHERED_BYTES:
            last += data
        elif data:
            self._chunks.append(bytearray(data))
        self.buffered_bytes += len(data)
        while True:
            if self._size_bytes < 0:
                if self.buffered_bytes < 5:
                    return
                head = self._take(5)
                self._is_deflated, self._size_bytes = bool(head[0]), int.from_bytes(head[1:], "big")
                self._check_head(head[0])
            if self.buffered_bytes < self._size_bytes:
                return
            message = self._take(self._size_bytes)
            self._size_bytes = -1
            self._add(Deflated(message) if self._is_deflated else message)

    def _check_head(self, flag: int) -> None:
        if self._size_bytes > self.max_message_bytes:
            raise too_large(self._size_bytes, self.max_message_bytes)
        if flag > 1:
            raise CallEnd(INTERNAL, f"a message has the flag {flag}, gRPC knows 0 and 1")
        if flag and self.encoding is None:
            raise CallEnd(INTERNAL, "a message is compressed, and the call has no grpc-encoding")

    def _take(self, size_bytes: int) -> bytes:
        """Takes the next `size_bytes` from the pieces, which have at least this size."""
        self.buffered_bytes -= size_bytes
        parts: list[bytes | bytearray] = []
        while size_bytes:
            chunk = self._chunks[0]
            end = min(len(chunk), self._offset + size_bytes)
            parts.append(chunk if end - self._offset == len(chunk) else chunk[self._offset : end])
            size_bytes -= end - self._offset
            self._offset = end
            if end == len(chunk):
                self._chunks.popleft()
                self._offset = 0
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)

    def _add(self, message: bytes) -> None:
        self.messages.append(message)
        self.unread_bytes += len(message) + _MESSAGE_OVERHEAD_BYTES

    def ignore(self) -> None:
        """Runs when bytes come after `drop_received`."""

    def drop_received(self) -> None:
        """Forgets unread messages and bytes, and ignores bytes that still come."""
        if not self.ignores_data:
            self.ignores_data = True
            self.messages.clear()
            self._chunks.clear()
            self._offset = self.buffered_bytes = self.unread_bytes = 0
            self._size_bytes = -1
            if self._held_bytes:
                self._release()

    def wake_reader(self) -> None:
        """Wakes a waiting read if it can return."""
        if (reading := self._reading) and (self.messages or self.is_ended or self.error):
            self._reading = None
            if not reading.done():
                reading.set_result(None)

    async def read(self) -> bytes | None:
        """Returns the next message, or None at the end of the peer's side. Raises `error`, and CallEnd."""
        while True:
            if self.error:
                raise self.error
            if self.messages:
                message = self.next_message()
                return await self.inflated(message) if isinstance(message, Deflated) else message
            if self.is_ended:
                self.check_end()
                return None
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading

    def next_message(self) -> bytes:
        """Takes the next whole message. At least one whole message must wait."""
        message = self.messages.popleft()
        self.unread_bytes -= len(message) + _MESSAGE_OVERHEAD_BYTES
        if self._held_bytes and self.unread_bytes <= _MAX_UNREAD_BYTES:
            self._release()
        return message

    def check_end(self) -> None:
        """Raises CallEnd if the peer ended its side within a message."""
        if self.buffered_bytes or self._size_bytes >= 0:
            raise CallEnd(INTERNAL, "the last message is incomplete")

    async def inflated(self, message: Deflated) -> bytes:
        """Returns a message without its compression. Raises CallEnd, also if the message becomes too large."""
        if self.encoding not in _WINDOW_BITS:  # identity; unknown encodings were refused before
            raise CallEnd(INTERNAL, "a message is compressed, and grpc-encoding says that it is not")
        try:
            inflated = await self.inflate(message, _WINDOW_BITS[self.encoding])
        except (zlib.error, Truncated) as error:
            raise CallEnd(INTERNAL, f"a message cannot be decompressed ({self.encoding.decode()})") from error
        if inflated is None:
            raise too_large(self.max_message_bytes + 1, self.max_message_bytes, "at least ")
        return inflated

    async def inflate(self, message: bytes, window_bits: int) -> bytes | None:
        """Decompresses in a thread; see `neuronpipe.core.parsing.inflate`."""
        return await asyncio.to_thread(inflate, message, window_bits, self.max_message_bytes)

    def _release(self) -> None:
        held_bytes, self._held_bytes = self._held_bytes, 0
        self.outbox.acknowledge(held_bytes, self.number)
        self.outbox.flush_soon()

    def put(self, message: bytes) -> None:
        """Queues a message, for `Outbox.note_written`. A large message is not copied: its prefix is queued apart."""
        engine, head = self.outbox.engine, b"\0" + len(message).to_bytes(4, "big")
        self.put_bytes += len(message) + 5
        if len(message) < _SMALL_PIECE_BYTES:
            engine.send_data(self.number, head + message)
        else:
            engine.send_data(self.number, head)
            engine.send_data(self.number, message)

    def has_room(self) -> bool:
        """Returns whether all queued bytes can be sent now."""
        return self.outbox.has_room(self.number)

    async def wait_for_room(self) -> None:
        """Returns once the next message may be queued, or once the stream is over."""
        while not (self.is_closed or self.has_room()):
            await self.outbox.wait_for_room(self.number)

    def close(self) -> None:
        """Ends the stream, and wakes its reader and its writer."""
        self.is_closed = self.is_ended = True
        if self._held_bytes:
            self._release()
        self.outbox.forget(self)
        if self._reading:
            self.wake_reader()


def too_large(size_bytes: int, limit_bytes: int, least: str = "") -> CallEnd:
    """Returns the end of a call whose message exceeds the limit."""
    problem = f"a message of {least}{size_bytes} bytes, the limit is {limit_bytes}; send less at once"
    return CallEnd(RESOURCE_EXHAUSTED, problem)
