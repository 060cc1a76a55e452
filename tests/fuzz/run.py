"""Sends messages to every method of a system, many at once, and says what came of them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import httpx
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2

from tests.fuzz.bodies import Bodies
from tests.fuzz.expanding import Shape, expanding_bodies, expanding_messages
from tests.fuzz.messages import Maker
from tests.fuzz.system import AGREE, FAULTS, WORDS, FuzzedSystem, Target, statuses_in, targets

# No call takes nearly as long, also on a machine that is busy with other work: what does hangs.
LIMIT_S = 120.0
_CALLERS = 12
_HTTP_SHARE = 0.15
_MAX_STREAMED = 6
# Of which much more is made than their bytes: larger than what servers read without counting.
_EXPANDING_SHARE, _EXPANDING_BYTES = 0.002, 300 << 10
# Of an item, and of a row: deadlines that the message itself sets.
_OWN_DEADLINES = (code_pb2.DEADLINE_EXCEEDED, code_pb2.CANCELLED)
# What grpc.aio's client says, in place of the server's status, where the server ends a stream that it still writes to.
_LOST = "Internal error from Core"
_HTTP = "HTTP"
_HTTP_FAULTS = (500, 502, 504)


class Failure(AssertionError):
    """A message that a server must not answer so."""


class Fuzzer:
    """Sends what it makes to a system. `outcomes` counts what came of it by door and status, `sent` messages."""

    def __init__(self, system: FuzzedSystem, chance: random.Random, document: Mapping[str, Any]) -> None:
        self.sent = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._chance = chance
        self._system = system
        self._maker = Maker(chance, WORDS, system.seeds, AGREE)
        self._schemas = document["components"]["schemas"]
        self._bodies = Bodies(chance, self._schemas, WORDS)
        self._shapes: dict[str, list[Shape]] = {}
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
            if not path.startswith("/console")
        ]
        self._targets = targets()
        self._channels = {name: grpc.aio.insecure_channel(system.address(name)) for name in system.processes}
        self._http = httpx.AsyncClient(base_url=f"http://{system.http_address}", timeout=LIMIT_S)

    async def run(self, goes_on: Callable[[int], bool]) -> None:
        """Sends until `goes_on`, of the messages sent so far, is false. Raises Failure."""

        async def caller() -> None:
            while goes_on(self.sent):
                if self._chance.random() < _HTTP_SHARE:
                    await self.call_http()
                else:
                    await self.call(self._chance.choice(self._targets))

        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(caller())

    async def reach_every_door(self, tries: int) -> None:
        """Goes on, with at most so many messages a door, until each has answered a right one. Raises Failure."""
        for _ in range(tries):
            for door in self.doors_without_an_answer():
                if door == _HTTP:
                    await self.call_http()
                else:
                    await self.call(self._chance.choice([target for target in self._targets if target.door == door]))

    def doors_without_an_answer(self) -> list[str]:
        """The doors that have answered no message as a right one, in the order of their names."""
        answered = {door for door, status in self.outcomes if status in ("OK", "200")}
        doors = {target.door for target in self._targets if "Trace" not in target.path} | {_HTTP}
        return sorted(doors - answered)

    async def close(self) -> None:
        await self._http.aclose()
        for channel in self._channels.values():
            await channel.close()

    async def call(self, target: Target) -> None:
        """Calls a method once: one that takes a stream with several messages. Raises Failure."""
        method = target.method
        count = self._chance.randrange(_MAX_STREAMED) if method.client_streaming else 1
        messages = [self._message(method.input_type) for _ in range(count)]
        self.sent += count
        door = target.door
        try:
            async for data in self._answers(target, messages):
                self._check_response(target, data, messages)
            self.outcomes[door, "OK"] += 1
        except grpc.aio.AioRpcError as failure:
            code, details = failure.code(), failure.details()
            if details == _LOST and method.client_streaming:
                code, details = await asyncio.to_thread(self._status_of, target, messages)
            self.outcomes[door, code.name] += 1
            if code.value[0] in (*FAULTS, code_pb2.DEADLINE_EXCEEDED, code_pb2.CANCELLED, code_pb2.UNAVAILABLE):
                if method.containing_service.file.package == "inference" and code.value[0] in _OWN_DEADLINES:
                    return  # its parameter `timeout`
                raise Failure(f"{target.path} ended as {code.name}: {details}\n{messages!r}") from failure

    def _message(self, descriptor: Descriptor) -> bytes:
        if self._chance.random() >= _EXPANDING_SHARE:
            return self._maker.data(descriptor)
        if descriptor.full_name not in self._shapes:
            self._shapes[descriptor.full_name] = list(expanding_messages(descriptor, _EXPANDING_BYTES))
        return self._chance.choice(self._shapes[descriptor.full_name])[1]()

    def _body(self, schema: Mapping[str, Any]) -> bytes:
        if self._chance.random() >= _EXPANDING_SHARE:
            return self._bodies.data(schema)
        return self._chance.choice(list(expanding_bodies(schema, self._schemas, _EXPANDING_BYTES)))[1]()

    async def _answers(self, target: Target, messages: list[bytes]) -> AsyncIterator[bytes]:
        channel: Any = self._channels[target.service]
        method = target.method
        if method.client_streaming and method.server_streaming:
            async for data in channel.stream_stream(target.path)(iter(messages), timeout=LIMIT_S):
                yield data
        elif method.server_streaming:
            async for data in channel.unary_stream(target.path)(messages[0], timeout=LIMIT_S):
                yield data
        elif method.client_streaming:
            yield await channel.stream_unary(target.path)(iter(messages), timeout=LIMIT_S)
        else:
            yield await channel.unary_unary(target.path)(messages[0], timeout=LIMIT_S)

    def _status_of(self, target: Target, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
        """What a server answers to a stream, by gRPC's other client."""
        with grpc.insecure_channel(self._system.address(target.service)) as channel:
            # The same on the wire, also where the server answers once.
            method: Any = channel.stream_stream(target.path)
            call = method(iter(messages), timeout=LIMIT_S)
            with suppress(grpc.RpcError):
                for _ in call:
                    pass
            return call.code(), call.details()

    def _check_response(self, target: Target, data: bytes, messages: list[bytes]) -> None:
        for status in statuses_in(GetMessageClass(target.method.output_type).FromString(data)):
            self.outcomes["of single inputs", code_pb2.Code.Name(status.code)] += 1
            if status.code in FAULTS:
                raise Failure(f"{target.path}: {status}\n{messages!r}")

    async def call_http(self) -> None:
        """Sends a request over HTTP. Raises Failure."""
        method, path, operation = self._chance.choice(self._operations)
        self.sent += 1
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                words = WORDS["model"] if parameter["name"] == "name" else WORDS.get(parameter["name"], ["1"])
                path = path.replace("{" + parameter["name"] + "}", self._chance.choice(words))
        body = None
        headers = {}
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"].get("application/json", {}).get("schema", {})
            body = self._body(schema)
            headers["content-type"] = "application/json"
        if self._chance.random() < 0.2:
            headers["neuronpipe-model"] = self._chance.choice(WORDS["model"])
        if self._chance.random() < 0.05:
            headers["content-encoding"] = self._chance.choice(("gzip", "deflate", "br"))
        try:
            response = await self._http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as failure:
            raise Failure(f"{method} {path}: {failure!r}\n{body!r}") from failure
        self.outcomes[_HTTP, str(response.status_code)] += 1
        if response.status_code in _HTTP_FAULTS:
            raise Failure(f"{method} {path}: {response.status_code} {response.text[:500]}\n{headers}\n{body!r}")


def for_messages(count: int, seconds: float = float("inf")) -> Callable[[int], bool]:
    """Goes on until so many messages are sent, or so long."""
    ends_s = time.monotonic() + seconds
    return lambda sent: sent < count and time.monotonic() < ends_s
