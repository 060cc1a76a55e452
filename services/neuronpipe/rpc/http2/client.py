"""The client's side of gRPC over HTTP/2: calls with streams of messages, over one connection to one address."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote

from google.rpc.code_pb2 import INTERNAL, UNAVAILABLE, UNKNOWN
from ngh2 import NGH2Error, Role
from ngh2.events import ResponseReceived, SettingsReceived, TrailersReceived

from neuronpipe.core.addresses import unix_path
from neuronpipe.platform.tls import LoadedTls
from neuronpipe.rpc.http2.closing import TLS_CLOSE_S
from neuronpipe.rpc.http2.connection import CANCEL, OPEN, Http2Connection, Keepalive
from neuronpipe.rpc.http2.stream import REFUSED_STREAM, MessageStream
from neuronpipe.rpc.transport import CallEnd

# Detects a server that vanished without closing the connection. Our servers allow a ping at this interval.
_KEEPALIVE_S = 20.0
_PING_LIMIT_S = 5.0
_CONNECT_LIMIT_S = 20.0
# Pause after the first failed attempt to connect. It doubles with each attempt, up to the second number.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_NO_HTTP2 = "the server does not speak HTTP/2"
# The gRPC status of a call that got an HTTP answer (gRPC, doc/http-grpc-status-mapping.md).
_STATUS_OF_HTTP = {b"400": 13, b"401": 16, b"403": 7, b"404": 12, b"429": 14, b"502": 14, b"503": 14, b"504": 14}


@dataclass(slots=True, eq=False)
class ClientCall(MessageStream):
    """A call with a stream of messages in both directions.

    `status`: the end of the call, once it is known. `has_grpc_status`: the server sent the status; otherwise a proxy or
    the loss of the connection ended the call.
    """

    connection: "_ClientConnection" = field(kw_only=True)
    status: CallEnd | None = None
    has_grpc_status: bool = False

    def take_head(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Takes the head of the answer, or the trailers."""
        fields = dict(headers)
        self.encoding = fields.get(b"grpc-encoding", self.encoding)
        if (http := fields.get(b":status", b"200")) != b"200":
            self._end(_STATUS_OF_HTTP.get(http, UNKNOWN), f"the server answered with HTTP {http.decode('latin-1')}")
        elif (status := fields.get(b"grpc-status")) is not None:
            self.has_grpc_status = True
            self._end(
                int(status) if status.isdigit() else UNKNOWN,
                unquote(fields.get(b"grpc-message", b"").decode("latin-1"), errors="replace"),
            )

    def _end(self, code: int, message: str) -> None:
        """Records the end of the call, which readers see after the last message."""
        self.is_ended = True
        self.status = self.status or CallEnd(code, message)
        self.wake_reader()

    async def read(self) -> bytes | None:
        """Returns the next message, or None once the server has ended the call with OK. Otherwise raises CallEnd."""
        message = await MessageStream.read(self)  # a class with slots that dataclass makes has no super()
        if message is None and self.status and self.status.code:
            raise self.status
        return message

    async def write(self, message: bytes) -> None:
        """Sends a message. Raises CallEnd if the call is over."""
        if self.is_closed or self.is_ended:
            raise self.status or CallEnd(UNAVAILABLE, "the connection has ended")
        self.put(message)
        self.outbox.note_written(self)
        if not self.has_room():
            await self.wait_for_room()

    def cancel(self) -> None:
        if not self.is_closed:
            self.is_closed = self.ignores_data = True
            self.outbox.reset(self.number, CANCEL)


class _ClientConnection(Http2Connection[ClientCall]):
    role = Role.CLIENT
    settings = {2: 0}  # noqa: RUF012 (nghttp2 wants a dict): no pushes

    def __init__(self) -> None:
        super().__init__(Keepalive(_KEEPALIVE_S, _PING_LIMIT_S))
        # Done when the server's first SETTINGS have come: a server that never answers on its connections gets no call.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Otherwise asyncio logs an exception that no call retrieves.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())

    def open_call(self, path: str, authority: str, scheme: str) -> ClientCall:
        """Opens a call. Raises NGH2Error if the connection takes no more calls."""
        head = [
            (b":method", b"POST"),
            (b":scheme", scheme.encode()),
            (b":path", path.encode()),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-accept-encoding", b"identity,gzip,deflate"),
        ]
        number = self.engine.send_request(head)
        call = self.streams[number] = ClientCall(self.outbox, number, (1 << 32) - 1, connection=self)
        self.outbox.flush_soon()
        return call

    def _take_head(self, event: ResponseReceived | TrailersReceived) -> None:
        if call := self.streams.get(event.stream_id):
            call.take_head(event.headers)

    def _take_settings(self, event: SettingsReceived) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        self.take_window(event)

    takers: ClassVar = {
        **Http2Connection.takers,
        ResponseReceived: _take_head,
        TrailersReceived: _take_head,
        SettingsReceived: _take_settings,
    }

    def refuse(self, stream: ClientCall, end: CallEnd) -> None:
        stream.status = end
        stream.error = end
        stream.cancel()
        stream.wake_reader()

    def stream_closed(self, stream: ClientCall, code: int) -> None:
        if not stream.status:
            problem = f"reset by HTTP/2 code {code}" if self.state is OPEN else "the connection has ended"
            stream.status = CallEnd(UNAVAILABLE if code in (CANCEL, REFUSED_STREAM) else INTERNAL, problem)
        stream.close()

    def failed(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionResetError(_NO_HTTP2))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.ready.done():
            tls = self.transport.get_extra_info("ssl_object")
            problem = _NO_HTTP2 if tls and tls.selected_alpn_protocol() != "h2" else "the server ends the connection"
            self.ready.set_exception(error or ConnectionResetError(problem))


@dataclass(eq=False)
class Http2Channel:
    """A connection to one address. The first call makes it, and the next call after it was lost makes another.

    - `address`: unix:PATH, ipv4:HOST:PORT or ipv6:[HOST]:PORT.
    - `server_name`: HOST or HOST:PORT, the name that the server's certificate must contain.
    - `note_failure`: gets the reason of each attempt to connect that fails.
    """

    address: str
    tls: LoadedTls | None = None
    server_name: str = ""
    note_failure: Callable[[str], None] = lambda reason: None
    _connection: _ClientConnection | None = None

    def __post_init__(self) -> None:
        self._path = unix_path(self.address)
        self._tls = None if self._path else self.tls
        self._authority = self.server_name or ("localhost" if self._path else self.address.partition(":")[2])

    async def open_call(self, path: str) -> ClientCall:
        """Opens a call once the server can be reached."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                connection = await self._connected()
                return connection.open_call(path, self._authority, "https" if self._tls else "http")
            except (OSError, NGH2Error) as error:  # OSError includes TimeoutError and ssl.SSLError
                self.note_failure(_reason(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _connected(self) -> _ClientConnection:
        before = self._connection
        if before and before.state is OPEN and not before.goaway_received.is_set():
            return before
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            if self._path:
                _, connection = await loop.create_unix_connection(_ClientConnection, self._path)
            else:
                host, _, port = self.address.partition(":")[2].rpartition(":")
                secure: dict[str, Any] = {}
                if self._tls:
                    name = self._authority.rpartition(":")[0] or self._authority
                    secure = {
                        "ssl": self._tls.h2_context,
                        "server_hostname": name.strip("[]"),
                        "ssl_shutdown_timeout": TLS_CLOSE_S,
                    }
                _, connection = await loop.create_connection(_ClientConnection, host.strip("[]"), int(port), **secure)
            try:
                await connection.ready
            except BaseException:
                connection.abort()
                raise
        self._connection = connection
        return connection

    async def close(self) -> None:
        """Ends all calls and the connection."""
        if self._connection:
            self._connection.close()


def _reason(error: Exception) -> str:
    """Returns the reason of a failed attempt to connect, for the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason}"
    if isinstance(error, OSError):
        return error.strerror or str(error) or f"no answer within {_CONNECT_LIMIT_S:g} s"
    return "the connection takes no more calls"
