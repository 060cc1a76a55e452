"""rpc/health.py: a service's health is followed through its life and its death."""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.health import follow_health

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _server(port: int = 0) -> tuple[grpc.aio.Server, health.aio.HealthServicer, int]:
    server, servicer = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, servicer, port


async def test_changes_are_reported_and_so_are_death_and_return() -> None:
    reports: asyncio.Queue[bool] = asyncio.Queue()

    async def expect(is_serving: bool) -> None:
        """Waits for the report; the same one more than once is no harm."""
        async with asyncio.timeout(10):
            while await reports.get() != is_serving:
                pass

    server, servicer, port = await _server()
    await servicer.set("", _SERVING)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        following = asyncio.create_task(follow_health(channel, reports.put))
        await expect(True)
        await servicer.set("", _NOT_SERVING)
        await expect(False)
        await servicer.set("", _SERVING)
        await expect(True)
        await server.stop(0)
        await expect(False)
        server, servicer, _ = await _server(port)
        await servicer.set("", _SERVING)
        await expect(True)
        following.cancel()
        await asyncio.wait([following])
    await server.stop(0)


async def test_a_service_that_is_not_there_is_waited_for() -> None:
    async with open_channel("127.0.0.1:9") as channel:  # nothing listens on the discard port
        following = asyncio.create_task(follow_health(channel, asyncio.Queue[bool]().put))
        await asyncio.sleep(0.05)  # nothing happens
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])
