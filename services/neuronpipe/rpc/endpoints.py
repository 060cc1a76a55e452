"""The gateway's side of a stage's stream, and the processes behind a target."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from neuronpipe.core.calls import told_error
from neuronpipe.core.errors import InternalError, InvalidInput, Unavailable
from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.status import from_status
from neuronpipe.core.streams import Outcome, StageResponse
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.codecs import read_models
from neuronpipe.rpc.items import LARGE_BYTES, StageRpc

# How often a target's addresses are asked for, so that new processes get work.
_RESOLVE_EVERY_S = 5.0
# So many complete answers in a row, a minute's, miss an address before it is retired. Servers of names that have many addresses tell some
# of them at a time: one of which each answer tells four in ten is missed so often once in 460 such minutes, one in two once in 4,100.
_MAX_ABSENCES = 12
# Between a stream that a server refused or ended and the next; gRPC itself waits for a server that is down.
_PAUSE_S = 0.1
# The same where the server is none of ours, or has a fault.
_REFUSED_PAUSE_S = 5.0

# Of a server that starts, stops or is gone.
_USUAL_ENDS = (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


class StageStream:
    """A stream to one process of a stage; see core/streams.py."""

    def __init__(self, rpc: StageRpc, call: _StreamCall, first: Any, retired: asyncio.Event) -> None:
        """`first`: the message with which the process said that it takes items."""
        self._rpc = rpc
        self._call = call
        self._max_message_bytes = 0
        self.models = self._announced(first)
        self.retired = retired

    async def send(self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int) -> Sequence[Outcome]:
        """Sends items, those that are large serialized in a thread. Returns the errors of those that cannot be sent. Raises Unavailable."""
        if size_bytes >= LARGE_BYTES:
            messages, refused = await asyncio.to_thread(self._serialize, items, abandoned_item_ids)
        else:
            messages, refused = self._serialize(items, abandoned_item_ids)
        try:
            for message in messages:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            raise Unavailable("the stream has ended") from failure
        return refused

    async def receive(self) -> StageResponse:
        """The next message. Raises Unavailable."""
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise Unavailable("the stream has ended") from failure
        if not isinstance(response, self._rpc.response_class):  # gRPC's EOF, or None for a message that cannot be read
            raise Unavailable("the stream has ended")
        return StageResponse(
            [(outcome.item_id, self._outcome(outcome)) for outcome in response.outcomes],
            response.draining.item_ids if response.HasField("draining") else None,
            self._announced(response),
        )

    def _serialize(self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int]) -> tuple[list[bytes], list[Outcome]]:
        """The items in as few messages as the process takes, nearly always one, and the errors of items that fit into none."""
        message = self._rpc.request_class(abandoned_item_ids=abandoned_item_ids)
        refused: list[Outcome] = []
        for item_id, item in items:
            try:
                written = message.items.add()
                self._rpc.codec.write_item(item, written)
                written.context.item_id = item_id
            except Exception as error:
                del message.items[-1]
                refused.append((item_id, told_error(error, item.call)))
        data = message.SerializeToString()
        if not self._max_message_bytes or len(data) <= self._max_message_bytes or not message.items:
            return [data] if data else [], refused
        if len(items) > 1:
            half = len(items) // 2
            first, second = self._serialize(items[:half], abandoned_item_ids), self._serialize(items[half:], ())
            return first[0] + second[0], first[1] + second[1]
        problem = f"{len(data)} bytes for the {self._rpc.service_name} service, which takes {self._max_message_bytes} at most"
        messages, _ = self._serialize((), abandoned_item_ids)
        return messages, [(items[0][0], InvalidInput("input", problem))]

    def _outcome(self, outcome: Any) -> Any:
        kind = outcome.WhichOneof("outcome")
        if kind == "error":
            return from_status(outcome.error)
        return self._rpc.codec.read_value(outcome) if kind else InternalError(f"the {self._rpc.service_name} service answered with nothing")

    def _announced(self, response: Any) -> frozenset[ModelKey] | None:
        if not response.HasField("announcement"):
            return None
        self._max_message_bytes = response.announcement.max_message_bytes
        return read_models(response.announcement)


async def follow_endpoints(rpc: StageRpc, target: str, serve: Callable[[StageStream], Awaitable[None]]) -> None:
    """Keeps a stream to every process behind the target and hands each to `serve` while it is open; until cancelled.

    `target`: "HOST:PORT", with every address that the host's name has, or several of these with commas; or "unix:PATH".
    """
    followed: dict[str, _Address] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            addresses, is_complete = await resolve(target)
            for address, one in list(followed.items()):
                if address in addresses:
                    one.absences = 0
                elif is_complete:  # else the old ones are the best guess
                    one.absences += 1
                if one.absences >= _MAX_ABSENCES:
                    followed.pop(address).retire()
            for new in addresses - followed.keys():
                followed[new] = one = _Address(rpc, new, serve)
                one.following = group.create_task(one.follow())
            await asyncio.sleep(_RESOLVE_EVERY_S)


class _Address:
    """An address of a target."""

    following: "asyncio.Task[None]"

    def __init__(self, rpc: StageRpc, address: str, serve: Callable[[StageStream], Awaitable[None]]) -> None:
        # Answers in a row that did not name it.
        self.absences = 0
        self._rpc = rpc
        self._address = address
        self._serve = serve
        self._is_served = False
        self._retired = asyncio.Event()

    def retire(self) -> None:
        """Ends it, once its process has answered what it has."""
        log("a stage's address is gone", rpc=self._rpc.path, address=self._address)
        self._retired.set()
        if not self._is_served:
            self.following.cancel()

    async def follow(self) -> None:
        """Keeps a stream to it until it is retired."""
        async with open_channel(self._address) as channel:
            # What is sent is bytes, so that its size is known.
            open_stream: Callable[..., _StreamCall] = channel.stream_stream(
                self._rpc.path, response_deserializer=self._rpc.response_class.FromString
            )
            while not self._retired.is_set():
                call = open_stream(wait_for_ready=True)
                try:
                    first = await call.read()
                    if isinstance(first, self._rpc.response_class):  # the service's sign that it takes items
                        await self._serve_stream(call, first)
                except grpc.aio.AioRpcError as failure:
                    if failure.code() not in _USUAL_ENDS:
                        log_warning("a stage refuses its stream", rpc=self._rpc.path, address=self._address, code=failure.code().name)
                        await asyncio.sleep(_REFUSED_PAUSE_S)
                finally:
                    call.cancel()
                await asyncio.sleep(_PAUSE_S)

    async def _serve_stream(self, call: _StreamCall, first: Any) -> None:
        self._is_served = True
        log("a stage's stream is open", rpc=self._rpc.path, address=self._address)
        try:
            await self._serve(StageStream(self._rpc, call, first, self._retired))
        finally:
            self._is_served = False
        if call.done():
            code, reason = await call.code(), await call.details()
            say = log if code in _USUAL_ENDS else log_warning
            say("a stage's stream has ended", rpc=self._rpc.path, address=self._address, code=code.name, reason=reason)


async def resolve(target: str) -> tuple[set[str], bool]:
    """The gRPC addresses of a target, and whether each of its names could be resolved now."""
    loop = asyncio.get_running_loop()
    addresses: set[str] = set()
    is_complete = True
    for one in map(str.strip, target.split(",")):
        if one.startswith("unix:"):
            addresses.add(one)
            continue
        host, _, port = one.removeprefix("dns:///").rpartition(":")
        try:
            found: Sequence[Any] = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            log_warning("a target cannot be resolved", target=one, problem=error.strerror)
            is_complete = False
            continue
        for family, _, _, _, where in found:
            addresses.add(f"ipv6:[{where[0]}]:{where[1]}" if family == socket.AF_INET6 else f"ipv4:{where[0]}:{where[1]}")
    return addresses, is_complete
