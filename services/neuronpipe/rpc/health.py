"""Health, of this service and of others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

# Between a watch that a server ended and the next; a server that is down is waited for by gRPC itself.
_PAUSE_S = 0.1


class StoppableHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """gRPC's health service, whose watches can be ended: they would hold up the server's stop for the whole of its grace."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[None]] = set()

    async def Watch(  # noqa: N802 (the name of the rpc)
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """As in the base, until the caller leaves or the server stops."""
        watch = asyncio.create_task(super().Watch(request, context))
        self._watches.add(watch)
        try:
            await asyncio.wait([watch])
        finally:
            watch.cancel()
            self._watches.discard(watch)

    def stop_watches(self) -> None:
        """Ends every watch."""
        for watch in self._watches:
            watch.cancel()


async def follow_health(channel: grpc.aio.Channel, report: Callable[[bool], Awaitable[None]]) -> None:
    """Reports whether the process behind a channel is serving, now and at every change, until cancelled."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        try:
            async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                await report(response.status == health_pb2.HealthCheckResponse.SERVING)
        except grpc.aio.AioRpcError:
            pass  # it went away: as much an answer as any
        await report(False)
        await asyncio.sleep(_PAUSE_S)
