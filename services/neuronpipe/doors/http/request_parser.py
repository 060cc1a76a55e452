"""Parses the requests of one connection with httptools, and limits their heads."""

import re
from enum import Enum
from typing import Protocol
from urllib.parse import unquote

import httptools

from neuronpipe.doors.http.wire import RequestHead

BAD_HEAD = "The request's head, or what stands behind its body, is too large, or did not arrive in time."
_VERSIONS = "This port takes HTTP/1.1."
# Characters of a host's name or address with its port (RFC 3986, 3.2.2).
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")


class BadRequest(Exception):
    """A request that cannot be parsed. `limit`: the setting that it exceeds, if any."""

    def __init__(self, message: str = "Invalid HTTP request received.", status: int = 400, limit: str = "") -> None:
        super().__init__(message)
        self.message, self.status, self.limit = message, status, limit


class RequestPhase(Enum):
    """The part of a request that the caller sends next."""

    DONE = "nothing, until a new request begins"
    IGNORED = "bytes that are not parsed any more"
    HEAD = "its head"
    BODY = "its body"
    CHUNK = "a chunk of its body, or the trailers if the last chunk has come"


class RequestTaker(Protocol):
    """Takes the parts of parsed requests; see HttpConnection."""

    def begin_request(self) -> None: ...
    def take_head(self, head: RequestHead, *, is_persistent: bool, is_awaited: bool) -> None: ...
    def take_body(self, body: bytes) -> None: ...
    def end_body(self) -> None: ...


def _problem_of(parser: httptools.HttpRequestParser, error: httptools.HttpParserError) -> BadRequest:
    if isinstance(error.__context__, BadRequest):  # raised by a method of RequestParser
        return error.__context__
    is_http_2 = parser.get_method() == b"PRI"
    return BadRequest(_VERSIONS, 505) if is_http_2 else BadRequest()


class RequestParser:
    """Parses the requests of a caller.

    A head, and the trailers, may have `max_header_bytes`: their fields, and the pieces after the first piece.
    """

    def __init__(self, taker: RequestTaker, max_header_bytes: int) -> None:
        self.phase = RequestPhase.DONE
        self._taker: RequestTaker | None = taker
        self._max_header_bytes = max_header_bytes
        # Size of the head or the trailers without the piece in which they begin; size of the fields of both.
        self._head_bytes = self._field_bytes = 0
        self._piece_bytes = 0
        self._url, self._fields = b"", list[tuple[bytes, bytes]]()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def close(self) -> None:
        """Ignores later input. Until then, this parser and the parser of httptools refer to each other."""
        self._taker = self._parser = None
        self.phase = RequestPhase.IGNORED

    def feed(self, piece: bytes) -> None:
        """Parses a piece of the input. Raises BadRequest."""
        self._piece_bytes, data = len(piece), piece
        while parser := self._parser:
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                if self._asks_for_other_protocol:
                    data = self._without_question(parser, data[end.args[0] :])
                    continue
            except httptools.HttpParserError as error:
                raise _problem_of(parser, error) from None
            break
        if self.phase is RequestPhase.HEAD or self.phase is RequestPhase.CHUNK:
            self._head_bytes += len(piece)
            if self._head_bytes > self._max_header_bytes:
                raise BadRequest(BAD_HEAD, limit="max_header_bytes")

    def _without_question(self, parser: httptools.HttpRequestParser, rest: bytes) -> bytes:
        """Returns the head without its request for another protocol, and the bytes behind the head, for a new parser.

        The first parser ends behind such a head. Java's client asks for h2c with each request, which is ignored (RFC
        9110, section 7.8).
        """
        is_last = any(name == b"connection" and b"close" in value.lower() for name, value in self._fields)
        head = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self._fields if name not in (b"connection", b"upgrade")]
        head += [b"connection: close"] * is_last + [b"", rest]
        self._parser = self._new_parser()
        return b"\r\n".join(head)

    @property
    def _asks_for_other_protocol(self) -> bool:
        parser = self._parser
        return bool(parser and parser.should_upgrade() and parser.get_method() != b"CONNECT")

    def on_message_begin(self) -> None:
        self.phase = RequestPhase.HEAD
        self._head_bytes, self._field_bytes = -self._piece_bytes, 0
        self._url, self._fields = b"", []
        if self._taker:
            self._taker.begin_request()

    def on_url(self, url: bytes) -> None:
        """Takes a part of the target."""
        self._url += url
        self._field_bytes += len(url)
        if self._field_bytes > self._max_header_bytes:
            raise BadRequest(BAD_HEAD, limit="max_header_bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a field of the head. Fields of trailers are only counted."""
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > self._max_header_bytes:
            raise BadRequest(BAD_HEAD, limit="max_header_bytes")
        if self.phase is RequestPhase.HEAD:
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Passes on the head of a request."""
        self.phase = RequestPhase.BODY
        parser = self._parser
        if not (parser and self._taker) or self._asks_for_other_protocol:
            return
        version = parser.get_http_version()
        self._check_framing(version)
        target = httptools.parse_url(self._url)
        if target.host:  # the host of an absolute target replaces the field (RFC 9112, 3.2.2)
            host = self._url.split(b"/", 3)[2].partition(b"?")[0]
            self._fields = [(name, host if name == b"host" else value) for name, value in self._fields]
        path = unquote((target.path or b"/").decode("ascii"))
        head = RequestHead(parser.get_method().decode(), path, target.query or b"", self._fields, version)
        # 100-continue is for newer callers (RFC 9110, 10.1.1).
        is_awaited = version != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in self._fields
        )
        is_persistent = version != "1.0" and parser.should_keep_alive()
        self._taker.take_head(head, is_persistent=is_persistent, is_awaited=is_awaited)

    def _check_framing(self, version: str) -> None:
        """Refuses a head that a proxy may take for another request (RFC 9112, 3.2 and 6.1), if the parser has not."""
        is_old = version == "1.0"
        if not is_old and version != "1.1":
            raise BadRequest(_VERSIONS, 505)
        hosts = [value for name, value in self._fields if name == b"host"]
        if len(hosts) > 1 or not (hosts or is_old):
            raise BadRequest(f"A request has one field host; this one has {len(hosts)}.")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise BadRequest("The field host has a character that no host has.")
        codings = [value.strip().lower() for name, value in self._fields if name == b"transfer-encoding"]
        if codings and is_old:
            raise BadRequest("HTTP/1.0 has no transfer-encoding.")
        if codings not in ([], [b"chunked"]):
            status = 501 if codings[-1].endswith(b"chunked") else 400
            raise BadRequest("Of transfer-encoding, only chunked is known; content-encoding may be gzip.", status)

    def on_chunk_header(self) -> None:
        """Begins a chunk, or the trailers if no body follows."""
        self.phase = RequestPhase.CHUNK
        self._head_bytes = -self._piece_bytes

    def on_body(self, body: bytes) -> None:
        """Passes on a part of the body."""
        self.phase = RequestPhase.BODY
        if self._taker:
            self._taker.take_body(body)

    def on_message_complete(self) -> None:
        if self._taker and not self._asks_for_other_protocol:
            self._taker.end_body()
            self.phase = RequestPhase.DONE
