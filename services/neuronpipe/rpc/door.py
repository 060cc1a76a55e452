"""A gRPC server with health, reflection and error mapping, the same for every service."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection

from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from neuronpipe.core.logs import log
from neuronpipe.process.door import Handler
from neuronpipe.process.health import HealthBoard
from neuronpipe.process.in_flight import MAX_CALLS, InFlight
from neuronpipe.process.settings import ServerSettings
from neuronpipe.rpc.abort import abort
from neuronpipe.rpc.health import HEALTH_SERVICE, health_handlers
from neuronpipe.rpc.rpcs import Context, Rpc, rpcs_of

_MIN_PING_INTERVAL_MS = 10_000
# Finds a caller that vanished without a word, whose calls would be worked on and whose connection would stay.
_KEEPALIVE_MS = 30_000
_KEEPALIVE_LIMIT_MS = 10_000


class GrpcDoor:
    """Takes gRPC calls at the address of the settings; a Door (process/door.py)."""

    def __init__(self, settings: ServerSettings, rpcs: Iterable[Rpc]) -> None:
        self._settings = settings
        self._rpcs = {rpc.path: rpc for rpc in rpcs}
        self._handlers: Mapping[str, Handler] = {}
        self._reads: set[asyncio.Timeout] = set()
        self._is_draining = False
        # Our own count comes first and says when to come back. gRPC's is the last resort: calls that are being refused, health, reflection.
        self._server = grpc.aio.server(options=list(_options(settings)), maximum_concurrent_rpcs=2 * MAX_CALLS)

    @property
    def services(self) -> Collection[str]:
        """The gRPC services that it has."""
        return {rpc.service for rpc in self._rpcs.values()}

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes connections, and refuses calls until it is open. Raises SetupError."""
        self._in_flight = in_flight
        watching = health_handlers(health)
        methods = {path: self._method(rpc, in_flight) for path, rpc in self._rpcs.items()}
        methods |= {rpc.path: self._method(rpc, contextlib.nullcontext(), watching[rpc.path]) for rpc in rpcs_of(HEALTH_SERVICE)}
        self._server.add_generic_rpc_handlers((_Methods(methods),))
        reflection.enable_server_reflection([*self.services, HEALTH_SERVICE.full_name, reflection.SERVICE_NAME], self._server)
        address = self._settings.listen
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {address}: {_bind_problem(address)}") from error
        await self._server.start()
        log("listening", address=f"{address.rpartition(':')[0]}:{port}")

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls from now on."""
        self._handlers = handlers

    def drain(self) -> None:
        """Ends the reading side of open streams."""
        self._is_draining = True
        for timer in self._reads:
            timer.reschedule(asyncio.get_running_loop().time())

    async def stop(self, grace_s: float) -> None:
        """gRPC's own stop, which alone knows when the last answer has left; it ends calls that arrive from now on with CANCELLED."""
        await self._server.stop(grace_s)

    def _method(self, rpc: Rpc, counted: AbstractContextManager[None], handler: Handler | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
        # To gRPC every client streams, which is the same on the wire: it would read a single message before it asks anybody.
        async def answer(unread: object, context: Context) -> Any:
            try:
                with counted:
                    answering = handler or self._handler(rpc)
                    return await answering(await self._request(rpc, context), context)
            except Exception as error:
                await abort(context, error)

        async def stream(unread: object, context: Context) -> AsyncIterator[Any]:
            try:
                with counted:
                    answering = handler or self._handler(rpc)
                    async with contextlib.aclosing(answering(await self._request(rpc, context), context)) as responses:
                        async for response in responses:
                            yield response
            except Exception as error:
                await abort(context, error)

        if rpc.server_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=rpc.encode)
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=rpc.encode)

    def _handler(self, rpc: Rpc) -> Handler:
        if rpc.path not in self._handlers:
            raise self._in_flight.starting()
        return self._handlers[rpc.path]

    async def _request(self, rpc: Rpc, context: Context) -> Any:
        if rpc.client_streaming:
            return self._requests(rpc, context)
        refusals: list[asyncio.Task[object]] = []

        def refuse(error: NeuronpipeError) -> None:
            refusals.append(asyncio.create_task(abort(context, error)))  # ends the read, too, which cannot be cancelled safely

        try:
            data = await self._in_flight.receive(context.peer(), context.read, refuse)
        finally:
            if refusals:
                await refusals[0]  # raises AbortError
        if data is grpc.aio.EOF:
            raise InvalidInput("request", "is missing")
        return _decoded(rpc, data)

    async def _requests(self, rpc: Rpc, context: Context) -> AsyncIterator[Any]:
        """A caller's stream until the caller ends it. Raises Unavailable as soon as the door drains: nothing new is begun then."""
        while not self._is_draining:
            try:
                async with asyncio.timeout(None) as timer:
                    self._reads.add(timer)
                    try:
                        data = await context.read()
                    finally:
                        self._reads.discard(timer)
            except TimeoutError:  # drain made the timer expire
                break
            if data is grpc.aio.EOF:
                return
            yield _decoded(rpc, data)
        raise self._in_flight.stopping()


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
        raise InvalidInput("request", f"is no valid {rpc.request_name}: broken, or holds a string that is not UTF-8") from error


def _options(settings: ServerSettings) -> Iterable[tuple[str, int]]:
    # Without this two processes can listen on one port and each gets a share of the calls.
    yield "grpc.so_reuseport", 0
    yield "grpc.max_receive_message_length", settings.max_message_bytes
    yield "grpc.max_send_message_length", -1
    # One connection does not take all calls of the process. What is more waits at the caller; with gRPC's overload protection half of it
    # ended as UNAVAILABLE instead (seen 2026-11-22, grpcio 1.85.1).
    yield "grpc.max_concurrent_streams", MAX_CALLS // 2
    yield "grpc.http.overload_protection", 0
    # Channels ping while idle (rpc/client.py); the default, five minutes, would cut them off with too_many_pings.
    yield "grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS
    yield "grpc.keepalive_permit_without_calls", 1
    yield "grpc.keepalive_time_ms", _KEEPALIVE_MS
    yield "grpc.keepalive_timeout_ms", _KEEPALIVE_LIMIT_MS
    yield "grpc.http2.ping_timeout_ms", _KEEPALIVE_LIMIT_MS  # else a minute
    yield "grpc.http2.max_pings_without_data", 0
    # Or gRPC takes megabytes of a message that nobody reads yet, not 64 KiB. One that is read gets a window of its size all the same.
    yield "grpc.http2.bdp_probe", 0
    if settings.max_connection_age_s:
        yield "grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)
        yield "grpc.max_connection_age_grace_ms", round(settings.max_connection_age_grace_s * 1000)


def _bind_problem(address: str) -> str:
    """Why an address cannot be listened on, in the operating system's words."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(resolved)
    except OSError as error:
        return error.strerror or "no such address"
    return "gRPC refuses the address"
