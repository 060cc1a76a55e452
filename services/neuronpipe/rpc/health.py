"""Follows the health of other services."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Between a watch that a server ended and the next; a server that is down is waited for by gRPC itself.
_PAUSE_S = 0.1


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
