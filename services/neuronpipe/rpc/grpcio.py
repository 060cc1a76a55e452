"""gRPC over grpcio's own transport, the other choice of --grpc-transport: servers, and channels to stages.

gRPC's Python API can neither count connections nor end one, so they are found among the open files of the process.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from neuronpipe.core.addresses import is_listened_on, unix_path
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, SetupError
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.in_flight import MAX_CALLS
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import LoadedTls, ServerTls
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.transport import CallEnd, Metadata, Method, ServerOptions, end_of

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_OPEN_FILES = Path("/proc/self/fd")
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# Calls that have arrived and are not accepted yet: above it gRPC ends new ones with CANCELLED, some at first, all at
# twice as many.
_MAX_PENDING_CALLS = 1000
_MIN_PING_INTERVAL_MS = 10_000
# Detects a caller that vanished without closing its connection. Its calls would be worked on, and the connection would
# stay open.
_KEEPALIVE_MS = 30_000
_KEEPALIVE_LIMIT_MS = 10_000


class ServerCall:
    """A ServerCall of rpc/transport.py. gRPC treats every client as a streaming one, which has the same wire format:
    else it would read a single message before any of our code runs.
    """

    def __init__(self, context: _Context) -> None:
        remaining_s = context.time_remaining()
        self.deadline_s: float | None = None if remaining_s is None else time.monotonic() + remaining_s
        self.metadata: Metadata = tuple(context.invocation_metadata() or ())
        self.metadata_bytes = sum([len(key) + len(value) for key, value in self.metadata])
        # Asked for now, as gRPC's core crashes where it is asked for the peer of a call that is over.
        self.peer = context.peer()
        self._context = context
        self._reading: asyncio.Task[Any] | None = None
        self._error: NeuronpipeError | None = None

    def peer_names(self) -> Sequence[str]:
        return peer_names(self._context)

    async def read(self) -> bytes | None:
        """Reads in a task of its own, which ends with the call. gRPC never frees the 1.5 KB of a read that is cancelled
        (seen 2026-11-22, grpcio 1.85.1), and callers could have as many cancelled as they like.
        """
        if self._error:
            raise self._error
        reading = asyncio.ensure_future(self._context.read())
        stopped = self._stopped = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.done():
                reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self._error:
            raise self._error
        data: Any = reading.result()
        return None if data is grpc.aio.EOF else data

    def stop_reading(self, error: NeuronpipeError) -> None:
        self._error = self._error or error
        if self._stopped and not self._stopped.done():
            self._stopped.set_result(None)

    _stopped: "asyncio.Future[None] | None" = None
    begin_send: Any

    async def send(self, message: bytes) -> None:
        unread = self.begin_send()
        try:
            await self._context.write(message)
        finally:  # also where the caller leaves meanwhile
            self.end_send(unread)

    end_send: Any


class GrpcioServer(grpc.GenericRpcHandler):
    """A Server of rpc/transport.py."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        settings, in_flight = options.settings, options.in_flight
        self._sends = in_flight.caller_waits("max_send_s", settings.max_send_s)
        self._ended = in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", "max_send_s")
        self._port = 0
        # Our own count refuses first, with a retry delay. gRPC's limit is the last resort: calls that are being
        # refused, health, reflection.
        self._server = grpc.aio.server(
            options=list(_server_options(settings, options.shares_port)), maximum_concurrent_rpcs=2 * MAX_CALLS
        )
        self._server.add_generic_rpc_handlers((self,))

    async def listen(self) -> int:
        address, tls = self._options.settings.listen, self._options.tls
        path = unix_path(address)
        try:
            if path and is_listened_on(path):  # gRPC would take it away from whoever listens there
                raise RuntimeError("in use")
            port = (
                self._server.add_secure_port(address, server_credentials(tls))
                if tls and not path
                else self._server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {address}: {_bind_problem(address, path)}") from error
        await self._server.start()
        self._port = 0 if path else port
        if self._port:
            self._options.in_flight.meters.gauge(Metrics.CONNECTIONS, partial(count_connections, port), "grpc")
        return self._port

    def ask_to_leave(self) -> bool:
        return False

    async def stop_listening(self, limit_s: float) -> None:
        return

    def take_no_more(self) -> None:
        return  # the door answers late calls: those that gRPC refuses itself end with CANCELLED

    async def stop(self, grace_s: float) -> None:
        """gRPC's own stop: only gRPC knows when the last response has been sent."""
        await self._server.stop(grace_s)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """gRPC's question for the method of a path."""
        method = self._options.find_method(handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, method)) if method else None

    async def _serve(self, method: Method, unread: object, context: _Context) -> None:
        call = ServerCall(context)
        call.begin_send = lambda: self._sends.begin(lambda is_late: self._end_connection(call.peer))
        call.end_send = self._sends.done
        try:
            if context.time_remaining() == 0.0:  # it waited inside gRPC for too long
                raise end_of(DeadlineExceeded("the deadline passed before the call was accepted"))
            method.accept(call)
            try:
                await method.answer(call, None if method.takes_stream else await self._receive(call, method))
            finally:
                method.done(call)
        except CallEnd as end:
            try:
                await context.abort(_CODES[end.code], end.message, tuple(end.trailers))
            except grpc.aio.InternalError:  # the call has ended meanwhile; as gRPC would have said, had it noticed
                raise asyncio.CancelledError from None

    async def _receive(self, call: ServerCall, method: Method) -> bytes | None:
        """The message of a caller that sends one. Raises CallEnd."""
        try:
            is_work = not method.is_own
            return await self._options.in_flight.receive(call.peer, call.read, call.stop_reading, is_work=is_work)
        except NeuronpipeError as error:
            raise end_of(error) from None

    def _end_connection(self, peer: str) -> None:
        self._ended.add()
        asyncio.get_running_loop().run_in_executor(None, end_connection, self._port, peer)


class _ClientCall:
    """A ClientCall of rpc/transport.py."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self._call = call

    async def read(self) -> bytes | None:
        try:
            data: Any = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise CallEnd(failure.code().value[0], failure.details() or "") from failure
        return None if data is grpc.aio.EOF else data

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            raise CallEnd(grpc.StatusCode.UNAVAILABLE.value[0], "the stream has ended") from failure

    def cancel(self) -> None:
        self._call.cancel()


class GrpcioChannel:
    """A Channel of rpc/transport.py."""

    def __init__(self, address: str, tls: LoadedTls | None = None, server_name: str = "") -> None:
        self._channel = open_channel(address, tls=tls, server_name=server_name)

    async def open_call(self, path: str) -> _ClientCall:
        return _ClientCall(self._channel.stream_stream(path)(wait_for_ready=True))

    async def close(self) -> None:
        await self._channel.close()


def peer_names(context: _Context) -> Sequence[str]:
    """The subject alternative names of the caller's certificate; empty without one."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in names]


def count_connections(port: int) -> int:
    """How many connections of a port are open."""
    return sum(1 for _ in _connections(port))


def end_connection(port: int, peer: str) -> None:
    """Ends the connection of a peer, as gRPC's contexts name it. gRPC then cancels its calls."""
    for connection in _connections(port):
        if _name(connection) == peer_address(peer):
            with contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)


def peer_address(peer: str) -> tuple[str, int] | None:
    """The address and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; None of other kinds."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


def _connections(port: int) -> Iterator[socket.socket]:
    """Copies of the sockets of connections to a port, each open until the next one."""
    if not _OPEN_FILES.is_dir():  # other systems than Linux
        return
    for file in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError), _copy(int(file.name)) as copy:  # closed meanwhile, or one that listens
            if copy.getsockname()[1:2] == (port,) and copy.getpeername():
                yield copy


def _copy(number: int) -> socket.socket:
    """A copy of an open file that is a socket. Raises OSError for others."""
    copied = os.dup(number)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


def _name(connection: socket.socket) -> tuple[str, int]:
    host, port = connection.getpeername()[:2]
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), port


def _server_options(settings: ProcessSettings, shares_port: bool) -> Iterable[tuple[str, int]]:
    # gRPC's default lets any two processes listen on one port, each of which gets a share of the connections.
    yield "grpc.so_reuseport", int(shares_port)
    yield "grpc.max_receive_message_length", settings.max_message_bytes
    yield "grpc.max_send_message_length", -1
    # One connection does not take all calls of the process. What is more waits at the caller; with gRPC's overload
    # protection half of it ended as UNAVAILABLE instead (seen 2026-11-22, grpcio 1.85.1).
    yield "grpc.max_concurrent_streams", settings.max_connection_calls
    yield "grpc.http.overload_protection", 0
    yield "grpc.server.max_pending_requests", _MAX_PENDING_CALLS
    yield "grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS
    # Channels ping while idle (rpc/client.py); the default, five minutes, would cut them off with too_many_pings.
    yield "grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS
    yield "grpc.keepalive_permit_without_calls", 1
    yield "grpc.keepalive_time_ms", _KEEPALIVE_MS
    yield "grpc.keepalive_timeout_ms", _KEEPALIVE_LIMIT_MS
    yield "grpc.http2.ping_timeout_ms", _KEEPALIVE_LIMIT_MS  # else a minute
    yield "grpc.http2.max_pings_without_data", 0
    # Or gRPC takes megabytes of a message that nobody reads yet, not 64 KiB. One that is read gets a window of its size
    # all the same.
    yield "grpc.http2.bdp_probe", 0
    yield "grpc.max_allowed_incoming_connections", settings.max_connections
    yield "grpc.server_handshake_timeout_ms", round(settings.max_handshake_s * 1000)
    yield "grpc.http2.settings_timeout", round(settings.max_handshake_s * 1000)
    # The same, or else some random calls between them would be refused.
    yield "grpc.max_metadata_size", settings.max_header_bytes
    yield "grpc.absolute_max_metadata_size", settings.max_header_bytes
    if settings.max_connection_idle_s:
        yield "grpc.max_connection_idle_ms", round(settings.max_connection_idle_s * 1000)
    if settings.max_connection_age_s:
        yield "grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)
        yield "grpc.max_connection_age_grace_ms", round(settings.max_connection_age_grace_s * 1000)


def _bind_problem(address: str, path: str | None) -> str:
    """Why an address cannot be listened on, in the operating system's words."""
    try:
        if path:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
            Path(path).unlink()
        else:
            host, _, port = address.rpartition(":")
            family, kind, _, _, resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(resolved)
    except OSError as error:
        return error.strerror or "no such address"
    return "gRPC refuses the address"


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that show the current certificate at each handshake."""
    taken = tls.watched.value

    def take_current() -> "grpc.ServerCertificateConfiguration | None":
        # gRPC calls it in threads of its own, so it only looks at what is loaded.
        nonlocal taken
        current = tls.watched.value
        if current is taken:
            return None
        taken = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        take_current,  # type: ignore[arg-type]  # None, for no change, is missing in its types
        require_client_authentication=tls.asks_for_certificates,
    )


def _configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    assert loaded.key  # noqa: S101 (every server side has both)
    assert loaded.certificate  # noqa: S101
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], root_certificates=loaded.ca)
