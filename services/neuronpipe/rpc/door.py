"""A gRPC server with health, reflection and error mapping, the same for every service."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.callers import enter_caller
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    NeuronpipeError,
    NotConfigured,
    Overloaded,
    SetupError,
)
from neuronpipe.core.logs import log
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.door import Guard, Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import MAX_CALLS, InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls.server import ServerTls
from neuronpipe.rpc.abort import abort
from neuronpipe.rpc.connections import count_connections, end_connection
from neuronpipe.rpc.health import HEALTH_SERVICE, WATCH, health_handlers
from neuronpipe.rpc.peers import check_peer, credentials_of, server_credentials
from neuronpipe.rpc.reads import StreamRead, read_message
from neuronpipe.rpc.rpcs import Context, Rpc, by_path, rpcs_of

# Watches of health, which are never over and need no credentials. Each of our clients has one.
_MAX_WATCHES = MAX_CALLS // 2
_REFLECTION_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_MIN_PING_INTERVAL_MS = 10_000
# Detects a caller that vanished without closing its connection. Its calls would be worked on, and the connection would
# stay open.
_KEEPALIVE_MS = 30_000
_KEEPALIVE_LIMIT_MS = 10_000


class GrpcDoor:
    """Takes gRPC calls at the address of the settings; a Door (platform/process/door.py).

    `port`: 0 where it is not known before the door listens, and for a unix socket.

    `shares_port`: other processes listen on it, too. `event`: what the log says once it listens. `tls`: of a port; a
    unix socket has none. `allowed_peers`: see StageSettings; health is told to every caller, and there is no
    reflection.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        rpcs: Iterable[Rpc],
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        *,
        allowed_peers: Collection[str] = (),
        shares_port: bool = False,
        event: str = "listening",
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._tls = tls
        self._allowed_peers = allowed_peers
        self._event = event
        self._rpcs = {rpc.path: rpc for rpc in rpcs}
        self._handlers: Mapping[str, Handler] = {}
        self._reads: set[StreamRead] = set()
        self._is_draining = False
        # Our own count refuses first, with a retry delay. gRPC's limit is the last resort: calls that are being
        # refused, health, reflection.
        self._server = grpc.aio.server(
            options=list(_options(settings, shares_port)), maximum_concurrent_rpcs=2 * MAX_CALLS
        )
        self.port = 0 if unix_path(settings.listen) else int(settings.listen.rpartition(":")[2])

    @property
    def services(self) -> Collection[str]:
        """The gRPC services that it has."""
        return {rpc.service for rpc in self._rpcs.values()}

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes connections, and refuses calls until it is open. Raises SetupError."""
        self._in_flight = in_flight
        self._sends = in_flight.caller_waits("max_send_s", self._settings.max_send_s)
        self._idle = in_flight.caller_waits("max_stream_idle_s", self._settings.max_stream_idle_s)
        self._ended = in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", "max_send_s")
        reflecting = reflection.aio.ReflectionServicer(
            [*self.services, HEALTH_SERVICE.full_name, reflection.SERVICE_NAME]
        )
        own = {"health": HEALTH_SERVICE, "reflection": _REFLECTION_SERVICE}
        if self._allowed_peers:
            del own["reflection"]
        handlers = health_handlers(health) | by_path(
            _REFLECTION_SERVICE, ServerReflectionInfo=reflecting.ServerReflectionInfo
        )
        methods = {path: self._method(rpc, in_flight, self._guard) for path, rpc in self._rpcs.items()}
        for name, service in own.items():
            guard = None if self._guard and name in self._guard.open_services else self._guard
            for rpc in rpcs_of(service):
                counted = _AtMost(_MAX_WATCHES) if rpc.path == WATCH else contextlib.nullcontext()
                methods[rpc.path] = self._method(rpc, counted, guard, handlers[rpc.path])
        self._server.add_generic_rpc_handlers((_Methods(methods),))
        address = self._settings.listen
        path = unix_path(address)
        try:
            if path and _is_listened_on(path):  # gRPC would take it away from whoever listens there
                raise RuntimeError("in use")
            port = (
                self._server.add_secure_port(address, server_credentials(self._tls))
                if self._tls and not path
                else self._server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {address}: {_bind_problem(address, path)}") from error
        await self._server.start()
        self.port = 0 if path else port
        if self.port:
            in_flight.meters.gauge(Metrics.CONNECTIONS, partial(count_connections, port), "grpc")
        log(self._event, address=address if path else f"{address.rpartition(':')[0]}:{port}")

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls from now on."""
        self._handlers = handlers

    def drain(self) -> None:
        """Ends the reading side of open streams."""
        self._is_draining = True
        for read in self._reads:
            read.end()

    async def stop(self, grace_s: float) -> None:
        """Ends connections by gRPC's own stop: only gRPC knows when the last response has been sent.

        Calls that arrive from now on end with CANCELLED.
        """
        await self._server.stop(grace_s)

    def _method(
        self,
        rpc: Rpc,
        counted: AbstractContextManager[None],
        guard: Guard | None,
        handler: Handler | None = None,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        allowed_peers = () if handler else self._allowed_peers

        # gRPC treats every client as a streaming one, which has the same wire format. Otherwise it would read a single
        # message before any of our code runs.
        async def answer(unread: object, context: Context) -> Any:
            remaining_s = context.time_remaining()
            try:
                if remaining_s == 0.0:  # it waited inside gRPC for too long
                    raise DeadlineExceeded("the deadline passed before the call was accepted")
                self._identify(context, guard)
                with counted:
                    answering = handler or self._handler(rpc)
                    await check_peer(context, allowed_peers)
                    if rpc.is_work:
                        self._in_flight.check_room(remaining_s)
                    peer = context.peer()
                    response = await answering(await self._request(rpc, context, peer), context)
            except Exception as error:
                await abort(context, error)
            # gRPC sends it from here on, and is done with the call when the caller has read it.
            unread_yet = self._begin_send(peer)
            context.add_done_callback(lambda _: self._sends.done(unread_yet))  # type: ignore[arg-type]
            return response

        async def stream(unread: object, context: Context) -> AsyncIterator[Any]:
            try:
                self._identify(context, guard)
                with counted:
                    answering, peer = handler or self._handler(rpc), context.peer()
                    await check_peer(context, allowed_peers)
                    if rpc.is_work and not rpc.client_streaming:
                        self._in_flight.check_room(context.time_remaining())
                    read = self._stream_read(rpc, context) if rpc.client_streaming else None
                    request = self._requests(rpc, read) if read else await self._request(rpc, context, peer)
                    async with contextlib.aclosing(answering(request, context)) as responses:
                        async for response in responses:
                            unread_yet = self._begin_send(peer)
                            try:
                                yield response
                            finally:  # also where the caller leaves meanwhile
                                self._sends.done(unread_yet)
                            if read:
                                read.answered()
            except Exception as error:
                # With any other status, clients that watch would never call this server (grpc/doc/health-checking.md).
                await abort(context, NotConfigured("health cannot be watched here") if rpc.path == WATCH else error)

        if rpc.server_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=rpc.encode)
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=rpc.encode)

    def _handler(self, rpc: Rpc) -> Handler:
        if rpc.path not in self._handlers:
            raise self._in_flight.starting()
        return self._handlers[rpc.path]

    async def _request(self, rpc: Rpc, context: Context, peer: str) -> Any:
        if rpc.client_streaming:
            return self._requests(rpc, self._stream_read(rpc, context))
        refusals: list[asyncio.Task[object]] = []

        def refuse(error: NeuronpipeError) -> None:
            refusals.append(
                asyncio.create_task(abort(context, error))
            )  # ends the read, too, which cannot be cancelled safely

        try:
            data = await self._in_flight.receive(peer, partial(read_message, context), refuse)
        finally:
            if refusals:
                await refusals[0]  # raises AbortError
        if data is grpc.aio.EOF:
            raise InvalidInput("request", "is missing")
        return _decoded(rpc, data)

    def _identify(self, context: Context, guard: Guard | None) -> None:
        """Checks a call's metadata, and enters its caller. Raises InvalidInput and Unauthenticated.

        gRPC holds the limit only once a caller has acknowledged it (seen 2026-11-22). It converts the metadata of a
        call each time that it is asked for them.
        """
        metadata = context.invocation_metadata() or ()
        size_bytes = sum([len(key) + len(value) for key, value in metadata])
        if size_bytes > self._settings.max_header_bytes:
            limit = self._settings.max_header_bytes
            raise InvalidInput("metadata", f"{size_bytes} bytes, the limit is {limit} (max_header_bytes)")
        if guard:
            enter_caller(guard.identify(credentials_of(context, metadata)))

    def _begin_send(self, peer: str) -> int:
        """A response is sent from now on; returns the number for `_sends.done`.

        `peer` is read before the handler runs: gRPC's core crashes where it is asked for that of a call that is over.
        """
        return self._sends.begin(lambda is_late: self._end_connection(peer))

    def _end_connection(self, peer: str) -> None:
        self._ended.add()
        asyncio.get_running_loop().run_in_executor(None, end_connection, self.port, peer)

    def _stream_read(self, rpc: Rpc, context: Context) -> StreamRead:
        def error_of(is_late: bool) -> NeuronpipeError:
            limit_s = self._settings.max_stream_idle_s
            return self._in_flight.waited(is_late, f"the stream had no request for {limit_s:g} s, the limit")

        return StreamRead(context, self._idle, error_of, is_answered=rpc.server_streaming)

    async def _requests(self, rpc: Rpc, read: StreamRead) -> AsyncIterator[Any]:
        """A caller's stream until the caller ends it.

        Raises Unavailable as soon as the door drains, because no new work is begun then, and DeadlineExceeded where the
        stream is idle for too long.
        """
        self._reads.add(read)
        try:
            while not self._is_draining:
                data = await read.next()
                if data is grpc.aio.EOF:
                    return
                if data is not None:
                    yield _decoded(rpc, data)
        finally:
            self._reads.discard(read)
        raise self._in_flight.stopping()


class _AtMost(AbstractContextManager[None]):
    """Counts calls of one kind. Raises Overloaded at the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def __enter__(self) -> None:
        if self._count >= self._limit:
            raise Overloaded(f"{self._count} calls of this kind, the limit", retry_after_s=1)
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """gRPC's question for the method of a path."""
        return self._methods.get(handler_call_details.method)


def _decoded(rpc: Rpc, data: bytes) -> Any:
    """A message; one that cannot be parsed is the caller's fault, whereas gRPC's own deserializers end in UNKNOWN."""
    try:
        return rpc.decode(data)
    except DecodeError as error:
        raise InvalidInput(
            "request", f"is no valid {rpc.request_name}: broken, or holds a string that is not UTF-8"
        ) from error


def _options(settings: ProcessSettings, shares_port: bool) -> Iterable[tuple[str, int]]:
    # gRPC's default lets any two processes listen on one port, each of which gets a share of the connections.
    yield "grpc.so_reuseport", int(shares_port)
    yield "grpc.max_receive_message_length", settings.max_message_bytes
    yield "grpc.max_send_message_length", -1
    # One connection does not take all calls of the process. What is more waits at the caller; with gRPC's overload
    # protection half of it ended as UNAVAILABLE instead (seen 2026-11-22, grpcio 1.85.1).
    yield "grpc.max_concurrent_streams", settings.max_connection_calls
    yield "grpc.http.overload_protection", 0
    yield "grpc.server.max_pending_requests", settings.max_pending_calls
    yield "grpc.server.max_pending_requests_hard_limit", 2 * settings.max_pending_calls
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


def _is_listened_on(path: str) -> bool:
    """Whether a process listens on a unix socket. Else its file was left behind by one that was killed, or is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it has no room for another connection, or none for us
            return True
        return True


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
