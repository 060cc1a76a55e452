"""A request over HTTP/1.1 and its answer, between a connection and the application."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, TypeAlias

from neuronpipe.core.logs import log_fault
from neuronpipe.doors.http.problems import RequestRefused
from neuronpipe.doors.inference import REQUEST_ID_FIELD

# Bytes of a body that wait for the application before the connection stops reading.
_MAX_WAITING_BYTES = 64 << 10
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
REQUEST_ID_HEADER = REQUEST_ID_FIELD.encode()
# Characters that no value of a field has (RFC 9110, 5.5).
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = (204, 304)

Fields: TypeAlias = Iterable[tuple[bytes, bytes]]


class RequestHead(NamedTuple):
    """The head of a request, with the names of its fields in lower case. `path`: decoded; `query`: as sent."""

    method: str
    path: str
    query: bytes
    fields: Sequence[tuple[bytes, bytes]]
    version: str = "1.1"


class ExchangeConnection(Protocol):
    """The connection of an exchange; see HttpConnection."""

    transport: asyncio.Transport
    is_writable: asyncio.Event
    peer: str

    @property
    def is_closing(self) -> bool: ...
    def date(self) -> bytes: ...
    def regulate_reading(self) -> None: ...
    def end_answer(self, exchange: "Exchange") -> None: ...
    def break_off(self, exchange: "Exchange") -> None: ...


class Exchange:
    """A request and its answer.

    - `has_left`: the caller has left, so nothing more is sent.
    - `more_body`: the caller is still sending the request's body.
    - `has_read_all`: the application has read the body to its end.
    """

    def __init__(
        self, connection: ExchangeConnection, head: RequestHead, *, keeps_alive: bool, is_awaited: bool
    ) -> None:
        """`is_awaited`: whether the caller waits with the body until it is asked for (100-continue)."""
        self.head = head
        self.keeps_alive = keeps_alive
        self.has_left = self.has_begun = self.is_complete = self.has_read_all = False
        self.more_body = True
        self._connection = connection
        self._is_awaited = is_awaited
        self._is_chunked = False
        self._body = bytearray()
        self._has_news = asyncio.Event()
        self._watching: asyncio.Task[Any] | None = None

    @property
    def peer(self) -> str:
        """The name of the caller's connection."""
        return self._connection.peer

    def take(self, data: bytes) -> None:
        """Takes a part of the body. The rest of a body that is not read is dropped."""
        if not self._watching:
            self._body += data
            self._has_news.set()

    @property
    def is_full(self) -> bool:
        """Whether the connection should stop reading, because much of the body waits for the application."""
        return len(self._body) > _MAX_WAITING_BYTES

    def end_body(self) -> None:
        self.more_body = False
        self._has_news.set()

    def leave(self) -> None:
        """Records that the caller has left, and cancels the task that watches for it."""
        self.has_left = True
        self._has_news.set()
        if self._watching:
            self._watching.cancel()

    async def run(self, app: "Application") -> None:
        """Answers the request."""
        try:
            await app(self)
        except asyncio.CancelledError:
            pass  # the answer breaks off without its end
        except Exception as fault:
            log_fault("a request over HTTP cannot be answered", fault)
        if not (self.is_complete or self.has_left):
            self._connection.break_off(self)

    def watch(self) -> None:
        """Cancels the running task if the caller leaves, until `forget`. The rest of the body is not read."""
        self._watching = asyncio.current_task()
        if self._body:
            self._body.clear()
            self._connection.regulate_reading()
        if self.has_left and self._watching:
            self._watching.cancel()

    def forget(self) -> None:
        """Ends the watch."""
        self._watching = None

    async def read(self, max_bytes: int, hint: str, has_come: Callable[[int], None]) -> bytes:
        """Returns the body, which has at most `max_bytes`. `hint`: see `too_large`.

        `has_come`: gets the number of bytes that have come, while more bytes are to come. Raises RequestRefused for a
        larger body, and CancelledError if the caller leaves.
        """
        parts, size_bytes = list[bytes](), 0
        while True:
            part = await self._next_part()
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > max_bytes:
                raise too_large(max_bytes, hint)
            if not self.more_body:
                self.has_read_all = True
                return parts[0] if len(parts) == 1 else b"".join(parts)
            has_come(size_bytes)

    async def _next_part(self) -> bytes:
        connection = self._connection
        if self._is_awaited and self.more_body and not connection.is_closing:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._is_awaited = False
        await self._has_news.wait()
        self._has_news.clear()
        if self.has_left:
            raise asyncio.CancelledError
        part, self._body = bytes(self._body), bytearray()
        connection.regulate_reading()
        return part

    async def answer(self, status: int, fields: Fields, body: bytes) -> None:
        """Sends a whole answer."""
        await self._wait_for_room()
        if not self.has_left:
            head = self._begin(status, fields)
            self._connection.transport.writelines((head, self._framed(body, is_last=True)))
            self._complete()

    async def begin(self, status: int, fields: Fields) -> None:
        """Sends the head of an answer whose body follows in parts."""
        await self._wait_for_room()
        if not self.has_left:
            self._connection.transport.write(self._begin(status, fields))

    async def write(self, part: bytes) -> None:
        """Sends a part of the answer's body."""
        await self._wait_for_room()
        if not self.has_left:
            self._connection.transport.write(self._framed(part, is_last=False))

    async def end(self) -> None:
        """Sends the end of an answer in parts."""
        await self._wait_for_room()
        if not self.has_left:
            self._connection.transport.write(self._framed(b"", is_last=True))
            self._complete()

    async def _wait_for_room(self) -> None:
        if not (self._connection.is_writable.is_set() or self.has_left):
            await self._connection.is_writable.wait()

    def _complete(self) -> None:
        self.is_complete = True
        self._connection.end_answer(self)

    def _framed(self, body: bytes, *, is_last: bool) -> bytes:
        if self.head.method == "HEAD":
            return b""
        if not self._is_chunked:
            return body
        return (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n" * is_last

    def _begin(self, status: int, fields: Fields) -> bytes:
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._connection.date()]
        # A caller of HTTP/1.0 knows no chunks: its answer ends with the connection (RFC 9112, 6.1 and 6.3).
        self._is_chunked = not (self.head.version == "1.0" or self.head.method == "HEAD" or status in _BODILESS)
        for name, value in fields:
            if _NO_VALUE.search(value):
                raise ValueError(f"the field {name.decode()} of an answer has a character that it cannot have")
            if name == b"content-length":
                self._is_chunked = False
            elif name == b"connection":  # close
                self.keeps_alive = False
                continue
            lines.append(b"%s: %s\r\n" % (name, value))
        if self._is_awaited and self.more_body:  # a body that was not asked for may come, or the next request instead
            self.keeps_alive = False
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.has_begun, self._is_awaited = True, False
        return b"".join([*lines, b"\r\n"])


Application: TypeAlias = Callable[[Exchange], Awaitable[None]]


def too_large(max_bytes: int, hint: str) -> RequestRefused:
    """Returns the error for a body that is larger than the limit. `hint`: the end of the message, with a remedy."""
    problem = f"the body is larger than {max_bytes} bytes, the limit{hint}"
    return RequestRefused(413, "content_too_large", problem)
