"""The gateway's side of a stage's stream, and the processes behind a target."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from neuronpipe.core.errors import Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.items import StageRpc

# How often a target's addresses are asked for, so that new processes get work.
_RESOLVE_EVERY_S = 5.0
# Between a stream that a server refused or ended and the next; gRPC itself waits for a server that is down.
_PAUSE_S = 0.1
# The same where the server is none of ours, or has a fault.
_REFUSED_PAUSE_S = 5.0

_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


class StageStream:
    """A stream to one process of a stage; see gateway/coalescing.py."""

    def __init__(self, rpc: StageRpc, call: _StreamCall) -> None:
        self._request_class, self._response_class = rpc.request_class, rpc.response_class
        self._call = call

    async def send(self, items: Sequence[Any], abandoned_item_ids: Sequence[int]) -> None:
        """Sends one message. Raises Unavailable."""
        try:
            await self._call.write(self._request_class(items=items, abandoned_item_ids=abandoned_item_ids))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            raise Unavailable("the stream has ended") from failure

    async def receive(self) -> tuple[Sequence[Any], Sequence[int] | None]:
        """The outcomes of the next message; and where the endpoint drains, what it still works on. Raises Unavailable."""
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise Unavailable("the stream has ended") from failure
        if not isinstance(response, self._response_class):  # gRPC's EOF, or None for a message that cannot be read
            raise Unavailable("the stream has ended")
        return response.outcomes, response.draining.item_ids if response.HasField("draining") else None


async def follow_endpoints(rpc: StageRpc, target: str, serve: Callable[[StageStream], Awaitable[None]]) -> None:
    """Keeps a stream to every process behind the target and hands each to `serve` while it is open; until cancelled.

    `target`: "HOST:PORT", with every address that the host's name has, or several of these with commas; or "unix:PATH".
    """
    following: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            addresses, is_complete = await resolve(target)
            for gone in (following.keys() - addresses) if is_complete else ():  # else the old ones are the best guess
                following.pop(gone).cancel()
            for new in addresses - following.keys():
                following[new] = group.create_task(_follow(rpc, new, serve))
            await asyncio.sleep(_RESOLVE_EVERY_S)


async def _follow(rpc: StageRpc, address: str, serve: Callable[[StageStream], Awaitable[None]]) -> None:
    request_class, response_class = rpc.request_class, rpc.response_class
    async with open_channel(address) as channel:
        open_stream = channel.stream_stream(
            rpc.path, request_serializer=request_class.SerializeToString, response_deserializer=response_class.FromString
        )
        while True:
            call = open_stream(wait_for_ready=True)
            try:
                if isinstance(await call.read(), response_class):  # the service's sign that it takes items
                    await serve(StageStream(rpc, call))
            except grpc.aio.AioRpcError as failure:
                if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    log_warning("a stage refuses its stream", rpc=rpc.path, address=address, code=failure.code().name)
                    await asyncio.sleep(_REFUSED_PAUSE_S)
            finally:
                call.cancel()
            await asyncio.sleep(_PAUSE_S)


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
