"""A gRPC server with health, reflection and error mapping, the same for every service.

Behind the door stand how it reads a stream, who its callers are, and the health service.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.callers import enter_caller
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, NotConfigured, Overloaded
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.names import ON_BEHALF
from neuronpipe.platform.process.door import Credentials, Guard, Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import LARGE_BYTES, MAX_CALLS, CallerWaits, InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.http2.server import Http2Server
from neuronpipe.rpc.rpcs import Context, Rpc, by_path, rpcs_of
from neuronpipe.rpc.transport import CallEnd, ServerCall, ServerOptions, end_of

# Watches of health, which are never over and need no credentials. Each of our clients has one.
_MAX_WATCHES = MAX_CALLS // 2
_REFLECTION_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


class GrpcDoor:
    """Takes gRPC calls at the address of the settings; a Door (platform/process/door.py).

    `port`: 0 where it is not known before the door listens, and for a Unix socket.

    `shares_port`: other processes listen on it, too. `listens_when_open`: until then connections to its port are
    refused, so that callers with several addresses use another one. `option`: what set the address. `event`: what the
    log says once it listens. `tls`: of a port; a Unix socket has none. `allowed_peers`: see StageSettings; health is
    told to every caller, and there is no reflection.
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
        listens_when_open: bool = False,
        option: str = "--listen",
        event: str = "listening",
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._tls = tls
        self._allowed_peers = allowed_peers
        self._option, self._event = option, event
        self._rpcs = {rpc.path: rpc for rpc in rpcs}
        self._handlers: Mapping[str, Handler] = {}
        self._reads: set[StreamRead] = set()
        self._is_draining = False
        self._server: Http2Server | None = None
        self.port = 0 if unix_path(settings.listen) else int(settings.listen.rpartition(":")[2])
        self._shares_port = shares_port
        self._listens_when_open = listens_when_open

    @property
    def services(self) -> Collection[str]:
        """The gRPC services that it has."""
        return {rpc.service for rpc in self._rpcs.values()}

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes its address, or also connections, whose calls it refuses until it is open. Raises SetupError."""
        self._in_flight = in_flight
        self._idle = in_flight.caller_waits("max_stream_idle_s", self._settings.max_stream_idle_s)
        reflecting = reflection.aio.ReflectionServicer(
            [*self.services, HEALTH_SERVICE.full_name, reflection.SERVICE_NAME]
        )
        own = {"health": HEALTH_SERVICE, "reflection": _REFLECTION_SERVICE}
        if self._allowed_peers:
            del own["reflection"]
        handlers = health_handlers(health) | by_path(
            _REFLECTION_SERVICE, ServerReflectionInfo=reflecting.ServerReflectionInfo
        )
        methods = {path: _Method(self, rpc, in_flight, self._guard) for path, rpc in self._rpcs.items()}
        watches, others = _AtMost(_MAX_WATCHES), _AtMost(MAX_CALLS)
        for name, service in own.items():
            guard = None if self._guard and name in self._guard.open_services else self._guard
            for rpc in rpcs_of(service):
                counted = watches if rpc.path == WATCH else others
                # Reflection's v1 has the messages of v1alpha; some clients know only one of them.
                for path in {rpc.path, rpc.path.replace(".v1alpha.", ".v1.")}:
                    methods[path] = _Method(self, rpc, counted, guard, handlers[rpc.path])
        self._server = Http2Server(
            ServerOptions(self._settings, in_flight, methods.get, self._tls, shares_port=self._shares_port)
        )
        self.port = self._server.listener.bind(self._option)
        if not self._listens_when_open:
            self._take_connections(self._server)

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls from now on. Raises SetupError where it cannot listen any more."""
        self._handlers = handlers
        if self._listens_when_open and self._server:
            self._take_connections(self._server)

    def _take_connections(self, server: Http2Server) -> None:
        server.listen()
        address = self._settings.listen
        log(self._event, address=f"{address.rpartition(':')[0]}:{self.port}" if self.port else address)

    def ask_to_leave(self) -> None:
        """Asks callers to send new calls elsewhere."""
        if self._server:
            self._server.ask_to_leave()

    async def stop_listening(self, limit_s: float) -> None:
        """Takes no new connections. Returns once the callers of the others know that they are to leave."""
        if self._server:
            await self._server.stop_listening(limit_s)

    def drain(self) -> None:
        """Takes no new calls, and ends the reading side of open streams."""
        self._is_draining = True
        if self._server:
            self._server.take_no_more()
        for read in self._reads:
            read.end(self._in_flight.stopping())

    async def stop(self, grace_s: float) -> None:
        """Ends connections once their last responses have been sent, which only the transport knows."""
        if self._server:
            await self._server.stop(grace_s)

    def handler_of(self, rpc: Rpc) -> Handler:
        """Raises Unavailable while the process starts."""
        if rpc.path not in self._handlers:
            raise self._in_flight.starting()
        return self._handlers[rpc.path]

    def admit(self, rpc: Rpc, call: ServerCall, guard: Guard | None, counted: AbstractContextManager[None]) -> None:
        """Decides on a call by its head. Raises what refuses it."""
        limit_bytes = self._settings.max_header_bytes
        if call.metadata_bytes > limit_bytes:
            raise InvalidInput(
                "metadata", f"{call.metadata_bytes} bytes, the limit is {limit_bytes} (max_header_bytes)"
            )
        if guard:
            enter_caller(guard.identify(credentials_of(call)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(counted)
            if rpc.path in self._rpcs:
                self.handler_of(rpc)
                check_peer(call, self._allowed_peers)
            if rpc.is_work and not (rpc.client_streaming and rpc.server_streaming):
                self._in_flight.check_room(None if call.deadline_s is None else call.deadline_s - time.monotonic())
            stack.pop_all()

    async def requests(self, rpc: Rpc, read: "StreamRead", connection: str) -> AsyncIterator[Any]:
        """A caller's stream until the caller ends it.

        Raises Unavailable as soon as the door drains, because no new work is begun then, and DeadlineExceeded where the
        stream is idle for too long.
        """
        if self._is_draining:
            raise self._in_flight.stopping()
        self._reads.add(read)
        while (data := await read.next()) is not None:
            yield await self.decode(rpc, data, connection)

    async def decode(self, rpc: Rpc, data: bytes | None, connection: str) -> Any:
        """A message. Raises InvalidInput, and Overloaded where there is no room for a large one."""
        if data is None or rpc.is_trusted or len(data) <= LARGE_BYTES:
            return _decoded(rpc, data)
        return await self._in_flight.make(connection, len(data), partial(_decoded, rpc, data))

    def forget(self, read: "StreamRead") -> None:
        """A stream is not read any more. Not left to its iterator, which may end much later than its call."""
        self._reads.discard(read)

    def stream_read(self, rpc: Rpc, call: ServerCall) -> "StreamRead":
        """Reads the stream of a call."""

        def error_of(is_late: bool) -> NeuronpipeError:
            limit_s = self._settings.max_stream_idle_s
            return self._in_flight.waited(is_late, f"the stream had no request for {limit_s:g} s, the limit")

        return StreamRead(call, self._idle, error_of, is_answered=rpc.server_streaming)


class _Method:
    """The calls of one path; a Method of rpc/transport.py."""

    def __init__(
        self,
        door: GrpcDoor,
        rpc: Rpc,
        counted: AbstractContextManager[None],
        guard: Guard | None,
        handler: Handler | None = None,
    ) -> None:
        """`handler`: of the door itself; None: the one that it was opened with."""
        self.takes_stream = rpc.client_streaming
        self._door = door
        self._rpc = rpc
        self._counted = counted
        self._guard = guard
        self._handler = handler

    def accept(self, call: ServerCall) -> None:
        try:
            self._door.admit(self._rpc, call, self._guard, self._counted)
        except Exception as error:
            raise self._end_of(error) from None

    async def answer(self, call: ServerCall, request: bytes | None) -> None:
        rpc = self._rpc
        read = self._door.stream_read(rpc, call) if self.takes_stream else None
        try:
            handler = self._handler or self._door.handler_of(rpc)
            door = self._door
            if read:
                message = door.requests(rpc, read, call.peer)
            elif request is None or len(request) <= LARGE_BYTES:
                message = _decoded(rpc, request)
            else:
                message = await door.decode(rpc, request, call.peer)
            if not rpc.server_streaming:
                await call.send(rpc.encode(await handler(message, call)))
                return
            async with contextlib.aclosing(handler(message, call)) as responses:
                async for response in responses:
                    await call.send(rpc.encode(response))
                    if read:
                        read.answered()
        except Exception as error:
            raise self._end_of(error) from None
        finally:
            if read:
                self._door.forget(read)

    def done(self, call: ServerCall) -> None:
        self._counted.__exit__(None, None, None)

    def _end_of(self, error: Exception) -> CallEnd:
        # With any other status, clients that watch would never call this server (grpc/doc/health-checking.md).
        return end_of(NotConfigured("health cannot be watched here") if self._rpc.path == WATCH else error)


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


def _decoded(rpc: Rpc, data: bytes | None) -> Any:
    """A message. Raises InvalidInput."""
    if data is None:
        raise InvalidInput("request", "is missing")
    try:
        return rpc.decode(data)
    except DecodeError as error:
        raise InvalidInput(
            "request", f"is no valid {rpc.request_name}: broken, or holds a string that is not UTF-8"
        ) from error


HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_NOT_FOUND = 5  # google.rpc.Code
WATCH = f"/{HEALTH_SERVICE.full_name}/Watch"


def health_handlers(board: HealthBoard) -> dict[str, Handler]:
    """The handlers of gRPC's health service (grpc/doc/health-checking.md)."""

    async def check(request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = _status(board.is_serving(request.service))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise CallEnd(_NOT_FOUND)
        return HealthCheckResponse(status=status)

    async def watch(request: HealthCheckRequest, context: Context) -> AsyncIterator[HealthCheckResponse]:
        async for is_serving in board.watch(request.service):
            yield HealthCheckResponse(status=_status(is_serving))

    return by_path(HEALTH_SERVICE, Check=check, Watch=watch)


def _status(is_serving: bool | None) -> "HealthCheckResponse.ServingStatus":
    if is_serving is None:
        return HealthCheckResponse.SERVICE_UNKNOWN
    return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING


_PERMISSION_DENIED = 7  # google.rpc.Code


def credentials_of(call: ServerCall) -> Credentials:
    """What a caller shows: metadata, or else the names of the certificate of its connection."""
    authorization = on_behalf = ""
    for key, value in call.metadata:
        if key == "authorization":
            authorization = authorization or str(value)
        elif key == ON_BEHALF:
            on_behalf = str(value)
    return Credentials(authorization, () if authorization else tuple(call.peer_names()), on_behalf)


def check_peer(call: ServerCall, allowed: Collection[str]) -> None:
    """Raises CallEnd where a caller has none of these names; without names, every caller may."""
    if not allowed:
        return
    names = call.peer_names()
    if not any(name in allowed for name in names):
        log_warning("a caller is not among the allowed peers", peer=call.peer, names=list(names))
        raise CallEnd(_PERMISSION_DENIED, "the caller's certificate has no name of an allowed peer")


class StreamRead:
    """Reads the messages of one stream, for one task.

    The stream is idle while a read waits and no request is without its answer. `error_of`: see InFlight.waited.
    `is_answered`: whether each request has an answer of its own.
    """

    def __init__(
        self, call: ServerCall, idle: CallerWaits, error_of: Callable[[bool], NeuronpipeError], *, is_answered: bool
    ) -> None:
        self._call = call
        self._idle = idle
        self._error_of = error_of
        self._is_answered = is_answered
        self._unanswered = 0
        self._idle_number: int | None = None
        self._is_reading = False

    async def next(self) -> bytes | None:
        """The next message; None at the end. Raises what `error_of` says of an idle stream, and what ends it."""
        self._is_reading = True
        self._begin_idle()
        try:
            data = await self._call.read()
            self._unanswered += self._is_answered
            return data
        finally:
            self._is_reading = False
            if self._idle_number is not None:
                self._idle.done(self._idle_number)
                self._idle_number = None

    def answered(self) -> None:
        """A request has its answer."""
        self._unanswered = max(0, self._unanswered - 1)
        self._begin_idle()

    def _begin_idle(self) -> None:
        if self._is_reading and not self._unanswered and self._idle_number is None:
            self._idle_number = self._idle.begin(lambda is_late: self.end(self._error_of(is_late)))

    def end(self, error: NeuronpipeError) -> None:
        """Makes the read that waits, and later ones, raise an error."""
        self._call.stop_reading(error)
