"""A gRPC server with health, reflection and error mapping, the same for every service."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc.code_pb2 import PERMISSION_DENIED
from grpc_reflection.v1alpha import reflection, reflection_pb2

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.callers import enter_caller
from neuronpipe.core.errors import InvalidInput, NotConfigured, Overloaded
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.names import ON_BEHALF
from neuronpipe.platform.process.door import Credentials, Guard
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import LARGE_BYTES, MAX_CALLS, InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.health import HEALTH_SERVICE, WATCH, health_handlers
from neuronpipe.rpc.http2.server import Http2Server
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, handlers_of
from neuronpipe.rpc.stream_read import StreamRead
from neuronpipe.rpc.transport import CallEnd, ServerCall, ServerOptions, end_of

# Limit of open watches of health, which never end and need no credentials. Each of our clients has a watch.
_MAX_WATCHES = MAX_CALLS // 2
_REFLECTION_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


@dataclass(eq=False)
class GrpcDoor:
    """Takes gRPC calls at the address of the settings; a Door (platform/process/door.py).

    `port`: 0 until the door listens if the system chooses it, and for a Unix socket. `services`: names of the gRPC
    services behind the door. Until the door is open it starts: it refuses their calls, and answers for health.

    - `tls`: files for a port; a Unix socket has none.
    - `allowed_peers`: see StageSettings. With allowed peers there is no reflection; health is open to every caller.
    - `shares_port`: other processes also listen on the port.
    - `listens_when_open`: the port refuses connections until the door is open, so that callers with several addresses
      use another address.
    - `option`: the option that set the address.
    - `event`: the log event once the door listens.
    - `max_stream_idle_s`: time for which a stream of requests may be open without a request in it; 0: for ever.
    """

    settings: ProcessSettings
    services: Collection[str]
    tls: ServerTls | None = None
    guard: Guard | None = None
    _: KW_ONLY
    allowed_peers: Collection[str] = ()
    shares_port: bool = False
    listens_when_open: bool = False
    option: str = "--listen"
    event: str = "listening"
    max_stream_idle_s: float = 0.0

    def __post_init__(self) -> None:
        self._methods: dict[str, _DoorMethod] = {}
        self._is_open = self._is_draining = False
        self._reads: set[StreamRead] = set()
        self._server: Http2Server | None = None
        self.port = 0 if unix_path(self.settings.listen) else int(self.settings.listen.rpartition(":")[2])

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Binds the address, and listens there unless `listens_when_open`; calls are refused until the door is open.

        Raises SetupError.
        """
        self._in_flight = in_flight
        self._idle = in_flight.caller_waits("max_stream_idle_s", self.max_stream_idle_s)
        self._add_health(health)
        if not self.allowed_peers:
            self._add_reflection()
        self._server = Http2Server(
            ServerOptions(self.settings, in_flight, self._find, self.tls, shares_port=self.shares_port)
        )
        self.port = self._server.listener.bind(self.option)
        if not self.listens_when_open:
            self._take_connections(self._server)

    def open(self, handlers: RpcHandlers) -> None:
        """Answers calls from now on. Raises SetupError if the address can no longer be listened on."""
        for rpc, handler in handlers:
            self._methods[rpc.path] = self._service_method(rpc, handler)
        self._is_open = True
        if self.listens_when_open and self._server:
            self._take_connections(self._server)

    def _add_health(self, health: HealthBoard) -> None:
        guard = self._guard_of("health")
        calls = _CallCount(MAX_CALLS)
        watches = _CallCount(_MAX_WATCHES)
        for rpc, handler in health_handlers(health):
            count = watches if rpc.path == WATCH else calls
            self._methods[rpc.path] = _DoorMethod(self, rpc, handler, count, guard)

    def _add_reflection(self) -> None:
        names = [*self.services, HEALTH_SERVICE.full_name, reflection.SERVICE_NAME]
        handlers = {"ServerReflectionInfo": reflection.aio.ReflectionServicer(names).ServerReflectionInfo}
        guard = self._guard_of("reflection")
        for rpc, handler in handlers_of(_REFLECTION_SERVICE, handlers):
            method = _DoorMethod(self, rpc, handler, _CallCount(MAX_CALLS), guard)
            # Reflection's v1 has the messages of v1alpha, and some clients know only v1 or only v1alpha.
            for path in (rpc.path, rpc.path.replace(".v1alpha.", ".v1.")):
                self._methods[path] = method

    def _guard_of(self, service: str) -> Guard | None:
        return None if self.guard and service in self.guard.open_services else self.guard

    def _service_method(self, rpc: Rpc, handler: RpcHandler) -> "_DoorMethod":
        return _DoorMethod(self, rpc, handler, self._in_flight, self.guard, _check=self._check_service_call)

    def _check_service_call(self, rpc: Rpc, call: ServerCall) -> None:
        """Raises Unavailable while the door starts, CallEnd for other peers, and Overloaded if there is no room."""
        if not self._is_open:
            raise self._in_flight.starting()
        if self.allowed_peers:
            check_peer(call, self.allowed_peers)
        if rpc.is_work and not (rpc.client_streaming and rpc.server_streaming):
            self._in_flight.check_room(None if call.deadline_s is None else call.deadline_s - time.monotonic())

    def _take_connections(self, server: Http2Server) -> None:
        server.listen()
        address = self.settings.listen
        log(self.event, address=f"{address.rpartition(':')[0]}:{self.port}" if self.port else address)

    def ask_to_leave(self) -> None:
        """Asks the callers to send new calls elsewhere."""
        if self._server:
            self._server.ask_to_leave()

    async def stop_listening(self, limit_s: float) -> None:
        """Takes no new connections. Returns once the callers on open connections know that they are to leave."""
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
        """Ends each connection once its last response was sent, which only the transport knows."""
        if self._server:
            await self._server.stop(grace_s)

    def _find(self, path: str) -> "_DoorMethod | None":
        """Returns the method of a path. While the door starts, each path of its services has a method."""
        if method := self._methods.get(path):
            return method
        is_of_service = path.rpartition("/")[0].removeprefix("/") in self.services
        return self._method_of_start(path) if is_of_service and not self._is_open else None

    def _method_of_start(self, path: str) -> "_DoorMethod":
        """Makes a method that refuses its calls, because the door starts; see _check_service_call."""

        async def handle(request: object, context: Context) -> bytes:
            raise self._in_flight.starting()  # no call is accepted

        # As if the caller sent a stream, so that each caller has written before it is told (ServerCall.refuse).
        return self._service_method(Rpc(path, path, bytes, bytes, client_streaming=True), handle)

    async def requests(self, rpc: Rpc, read: StreamRead, connection: str) -> AsyncIterator[Any]:
        """Yields the messages of a caller's stream, until the caller ends it.

        Raises Unavailable as soon as the door drains, because no new work begins then, and DeadlineExceeded if the
        stream is idle for too long. The door keeps reading a gateway's stream while it drains, because the gateway says
        there which items it has abandoned.
        """
        if self._is_draining:
            raise self._in_flight.stopping()
        if not rpc.is_trusted:
            self._reads.add(read)
        while (data := await read.next()) is not None:
            yield await self.decode(rpc, data, connection)

    async def decode(self, rpc: Rpc, data: bytes | None, connection: str) -> Any:
        """Returns the message of `data`. Raises InvalidInput, and Overloaded without room for a large message."""
        if data is None or rpc.is_trusted or len(data) <= LARGE_BYTES:
            return _decoded(rpc, data)
        return await self._in_flight.make(connection, len(data), partial(_decoded, rpc, data))

    def forget(self, read: StreamRead) -> None:
        """Forgets a stream that is no longer read. Its iterator does not do this: it may end long after the call."""
        self._reads.discard(read)

    def stream_read(self, rpc: Rpc, call: ServerCall) -> StreamRead:
        """Makes the reader of a call's stream."""
        late = f"the stream had no request for {self.max_stream_idle_s:g} s, the limit"
        return StreamRead(
            call, self._idle, partial(self._in_flight.waited, late=late), is_answered=rpc.server_streaming
        )


@dataclass(eq=False)
class _DoorMethod:
    """The calls of one path; a Method of rpc/transport.py.

    `_calls` counts them, and `_check` raises the error that refuses a counted call.
    """

    _door: GrpcDoor
    _rpc: Rpc
    _handler: RpcHandler
    _calls: "InFlight | _CallCount"
    _guard: Guard | None
    _check: Callable[[Rpc, ServerCall], None] | None = None

    def __post_init__(self) -> None:
        self.takes_stream = self._rpc.client_streaming
        self._max_metadata_bytes = self._door.settings.max_header_bytes

    def accept(self, call: ServerCall) -> None:
        try:
            size, limit = call.metadata_bytes, self._max_metadata_bytes
            if size > limit:
                raise InvalidInput("metadata", f"{size} bytes, the limit is {limit}; send less metadata")
            if self._guard:
                enter_caller(self._guard.identify(credentials_of(call)))
            self._calls.begin()
        except Exception as error:
            raise self._end_of(error) from None
        try:
            if self._check:
                self._check(self._rpc, call)
        except Exception as error:
            self._calls.end()
            raise self._end_of(error) from None

    async def answer(self, call: ServerCall, request: bytes | None) -> bytes | None:
        door, rpc = self._door, self._rpc
        read = door.stream_read(rpc, call) if self.takes_stream else None
        try:
            if read:
                message = door.requests(rpc, read, call.peer)
            elif request is None or len(request) <= LARGE_BYTES:
                message = _decoded(rpc, request)
            else:
                message = await door.decode(rpc, request, call.peer)
            answer: Any = self._handler(message, call)
            if not rpc.server_streaming:
                return rpc.encode(await answer)
            async with contextlib.aclosing(answer) as responses:
                async for response in responses:
                    await call.send(rpc.encode(response))
                    if read:
                        read.answered()
            return None
        except Exception as error:
            raise self._end_of(error) from None
        finally:
            if read:
                door.forget(read)

    def done(self, call: ServerCall) -> None:
        self._calls.end()

    def _end_of(self, error: Exception) -> CallEnd:
        # After any other status, clients that watch would never call this server (grpc/doc/health-checking.md).
        return end_of(NotConfigured("health cannot be watched here") if self._rpc.path == WATCH else error)


@dataclass(eq=False)
class _CallCount:
    """Counts calls that the process does not wait for when it drains. Raises Overloaded at the limit."""

    limit: int
    count: int = 0

    def begin(self) -> None:
        if self.count >= self.limit:
            raise Overloaded(f"{self.count} calls of this kind, the limit", retry_after_s=1)
        self.count += 1

    def end(self) -> None:
        self.count -= 1


def _decoded(rpc: Rpc, data: bytes | None) -> Any:
    """Returns the parsed message. Raises InvalidInput."""
    if data is None:
        raise InvalidInput("request", "is missing")
    try:
        return rpc.decode(data)
    except DecodeError as error:
        raise InvalidInput(
            "request", f"is no valid {rpc.request_name}: broken, or holds a string that is not UTF-8"
        ) from error


def credentials_of(call: ServerCall) -> Credentials:
    """Returns the credentials of a caller: its metadata, or else the names in the certificate of its connection."""
    authorization = on_behalf = ""
    for key, value in call.metadata:
        if key == "authorization":
            authorization = authorization or str(value)
        elif key == ON_BEHALF:
            on_behalf = str(value)
    return Credentials(authorization, () if authorization else tuple(call.peer_names()), on_behalf)


def check_peer(call: ServerCall, allowed: Collection[str]) -> None:
    """Raises CallEnd if a caller's certificate has none of the allowed names."""
    names = call.peer_names()
    if not any(name in allowed for name in names):
        log_warning("a caller is not among the allowed peers", peer=call.peer, names=list(names))
        raise CallEnd(PERMISSION_DENIED, "the caller's certificate has no name of an allowed peer")
