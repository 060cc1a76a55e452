"""A service's health."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


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
