"""rpc/health.py: watches follow a service's health until they are ended."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neuronpipe.rpc.health import StoppableHealth

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LIMIT_S = 10


@pytest.fixture
async def health() -> StoppableHealth:
    servicer = StoppableHealth()
    await servicer.set("", _SERVING)
    return servicer


@pytest.fixture
async def stub(health: StoppableHealth) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


async def _watch(stub: Any) -> Any:
    """A watch that has said what is now."""
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=_LIMIT_S)
    assert (await watch.read()).status == _SERVING
    return watch


async def test_a_watch_tells_of_changes(health: StoppableHealth, stub: Any) -> None:
    watch = await _watch(stub)
    await health.set("", _NOT_SERVING)
    assert (await watch.read()).status == _NOT_SERVING


async def test_watches_end_without_an_error_when_they_are_stopped(health: StoppableHealth, stub: Any) -> None:
    watches = [await _watch(stub) for _ in range(2)]
    health.stop_watches()
    assert [await watch.read() for watch in watches] == [grpc.aio.EOF, grpc.aio.EOF]


async def test_a_watcher_who_leaves_takes_the_watch_along_and_leaves_others_alone(health: StoppableHealth, stub: Any) -> None:
    leaving, staying = await _watch(stub), await _watch(stub)
    leaving.cancel()
    async with asyncio.timeout(_LIMIT_S):
        while len(health._watches) != 1:
            await asyncio.sleep(0)
    await health.set("", _NOT_SERVING)
    assert (await staying.read()).status == _NOT_SERVING
