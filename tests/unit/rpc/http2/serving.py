"""A server of rpc/http2 with one method, and callers that send the frames they are told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from google.rpc.code_pb2 import Code
from ngh2 import Configuration, Role
from ngh2 import Connection as Engine
from ngh2.events import DataReceived, ResponseReceived, StreamClosed, TrailersReceived

from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.http2.server import Http2Server
from neuronpipe.rpc.transport import ServerCall, ServerOptions, end_of
from tests.interop import frames
from tests.suite.constants import with_constants
from tests.suite.waiting import cancelled, happens

Answer: TypeAlias = Callable[[ServerCall, bytes | None], Awaitable[None]]


async def echo(call: ServerCall, request: bytes | None) -> None:
    await call.send(request if request is not None else b"nothing")


async def echo_all(call: ServerCall, request: bytes | None) -> None:
    while (message := await call.read()) is not None:
        await call.send(message)


class Held:
    """Answers each call with these bytes, or with its request, once it may."""

    def __init__(self, data: bytes | None = None) -> None:
        self.may_answer = asyncio.Event()
        self._data = data

    async def __call__(self, call: ServerCall, request: bytes | None) -> None:
        await self.may_answer.wait()
        await call.send(self._data if self._data is not None else request or b"")


class Method:
    """What a door does with calls: counts them, and answers so."""

    def __init__(self, answer: Answer, *, takes_stream: bool = False) -> None:
        self.takes_stream, self.is_own = takes_stream, False
        self.refuses: Exception | None = None
        self.accepted = self.ended = 0
        self._answer = answer

    def accept(self, call: ServerCall) -> None:
        if self.refuses:
            raise end_of(self.refuses)
        self.accepted += 1

    async def answer(self, call: ServerCall, request: bytes | None) -> None:
        await self._answer(call, request)

    def done(self, call: ServerCall) -> None:
        self.ended += 1


class Caller:
    """A client that sends the frames it is told to, and keeps what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine = Engine(
            Role.CLIENT, Configuration(max_send_header_block_length=1 << 22, peer_max_concurrent_streams=10_000)
        )
        self.engine.initiate_connection({4: 1 << 24})
        self.engine.set_local_window_size(1 << 26)
        self.events: list[Any] = []
        self.is_over = False
        self.writer = writer
        self._reading = asyncio.create_task(self._read(reader))
        self.flush()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            self.engine.receive_data(data)
            self.events += self.engine.events()
            self.flush()
        self.is_over = True

    def flush(self) -> None:
        """Sends the frames that are due."""
        self.writer.write(self.engine.data_to_send())

    def open(self, path: str = "/a/Echo", *fields: tuple[bytes, bytes], ends: bool = False) -> int:
        head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"a")]
        number = self.engine.send_request(
            [*head, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *fields], end_stream=ends
        )
        self.flush()
        return number

    def send(self, number: int, data: bytes, *, ends: bool = False) -> None:
        self.engine.send_data(number, data, end_stream=ends)
        self.flush()

    def call(self, message: bytes, path: str = "/a/Echo", *fields: tuple[bytes, bytes]) -> int:
        number = self.open(path, *fields)
        self.send(number, frames.message(message), ends=True)
        return number

    def of(self, number: int, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.stream_id == number]

    async def end(self, number: int) -> dict[bytes, bytes]:
        """The fields of the end of a call, once it is over."""
        await happens(lambda: bool(self.of(number, StreamClosed)) or self.is_over)
        fields = [field for event in self.of(number, ResponseReceived) for field in event.headers]
        fields += [field for event in self.of(number, TrailersReceived) for field in event.headers]
        return dict(fields)

    async def code(self, number: int) -> str:
        """The name of a call's status, "reset" for none."""
        status = (await self.end(number)).get(b"grpc-status")
        return "reset" if status is None else Code.Name(int(status))

    def received(self, number: int) -> bytes:
        return b"".join(event.data for event in self.of(number, DataReceived))

    async def close(self) -> None:
        self.writer.close()
        await cancelled(self._reading)


class System:
    """A server with one method, and its callers."""

    def __init__(self, server: Http2Server, method: Method, port: int) -> None:
        self.server, self.method, self.port = server, method, port
        self.callers: list[Caller] = []

    def ended(self, limit: str) -> float:
        """How many connections were ended for a limit."""
        return self.server.options.in_flight.meters.counter(Metrics.CONNECTIONS_ENDED, "grpc", limit).value

    async def connect(self) -> Caller:
        self.callers.append(Caller(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.callers[-1]


@asynccontextmanager
async def serving(
    answer: Answer = echo, *, takes_stream: bool = False, tls: ServerTls | None = None, **changes: Any
) -> AsyncIterator[System]:
    given: dict[str, Any] = {"listen": "127.0.0.1:0"} | changes
    settings = with_constants(ProcessSettings, **given)
    method = Method(answer, takes_stream=takes_stream)
    in_flight = InFlight("test", settings.max_message_bytes, settings.max_receiving_bytes)
    find = {"/a/Echo": method}.get
    server = Http2Server(ServerOptions(settings, in_flight, find, tls, shares_port=False))
    system = System(server, method, server.listener.bind("--listen"))
    server.listen()
    try:
        yield system
        await happens(lambda: method.accepted == method.ended or bool(server.connections))  # each counted call is over
    finally:
        for caller in system.callers:
            await caller.close()
        await server.stop(1)
    assert method.accepted == method.ended


@asynccontextmanager
async def connected(answer: Answer = echo, **options: Any) -> AsyncIterator[tuple[System, Caller]]:
    """As serving, with a caller that is connected."""
    async with serving(answer, **options) as system:
        yield system, await system.connect()
