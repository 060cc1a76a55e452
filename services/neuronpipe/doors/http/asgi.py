"""A request over HTTP/1.1 and its answer, in the form of ASGI, between a connection and the application."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.logs import log_fault

# Bytes of a body that wait for the application before the connection stops reading.
_MAX_WAITING_BYTES = 64 << 10
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
# Characters that no value of a field has (RFC 9110, 5.5).
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = (204, 304)

Message: TypeAlias = dict[str, Any]
# ASGI's application: scope, receive, send.
Application: TypeAlias = Callable[
    [Mapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class ExchangeConnection(Protocol):
    """The connection of an exchange; see HttpConnection."""

    transport: asyncio.Transport
    is_writable: asyncio.Event

    @property
    def is_closing(self) -> bool: ...
    def date(self) -> bytes: ...
    def regulate_reading(self) -> None: ...
    def end_answer(self, exchange: "Exchange") -> None: ...
    def break_off(self, exchange: "Exchange") -> None: ...


class Exchange:
    """A request and its answer. `more_body`: whether the caller is still sending the request's body."""

    def __init__(self, connection: ExchangeConnection, scope: Message, *, keeps_alive: bool, is_awaited: bool) -> None:
        """`is_awaited`: whether the caller waits with the body until it is asked for (100-continue)."""
        self.keeps_alive = keeps_alive
        self.is_of_head = scope["method"] == "HEAD"
        self.has_left = self.has_begun = self.is_complete = False
        self.more_body = True
        self._connection = connection
        self._scope = scope
        self._is_awaited = is_awaited
        self._is_chunked = False
        self._body = bytearray()
        self._has_news = asyncio.Event()

    def take(self, data: bytes) -> None:
        """Takes a part of the body."""
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
        """Records that the caller has left, so nothing more is sent."""
        self.has_left = True
        self._has_news.set()

    async def run(self, app: Application) -> None:
        """Answers the request."""
        try:
            await app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            pass  # the answer breaks off without its end
        except Exception as fault:
            log_fault("a request over HTTP cannot be answered", fault)
        if not (self.is_complete or self.has_left):
            self._connection.break_off(self)

    async def _receive(self) -> Message:
        connection = self._connection
        if self._is_awaited and self.more_body and not connection.is_closing:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._is_awaited = False
        if not (self.has_left or self.is_complete):
            await self._has_news.wait()
            self._has_news.clear()
        if self.has_left or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        connection.regulate_reading()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _send(self, message: Message) -> None:
        connection = self._connection
        if not (connection.is_writable.is_set() or self.has_left):
            await connection.is_writable.wait()
        if self.has_left:
            return
        if not self.has_begun:
            self._begin(message["status"], message["headers"])
            return
        body, is_last = message["body"], not message.get("more_body")
        if self.is_of_head:
            body = b""
        elif self._is_chunked:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n" * is_last
        connection.transport.write(body)
        if is_last:
            self.is_complete = True
            self._has_news.set()
            connection.end_answer(self)

    def _begin(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._connection.date()]
        # A caller of HTTP/1.0 knows no chunks: its answer ends with the connection (RFC 9112, 6.1 and 6.3).
        self._is_chunked = not (self._scope["http_version"] == "1.0" or self.is_of_head or status in _BODILESS)
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
        self._connection.transport.write(b"".join([*lines, b"\r\n"]))
