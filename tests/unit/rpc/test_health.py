"""rpc/health.py over a real connection: gRPC's health service shows the health of the process."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc.door import GrpcDoor

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_LIMIT_S = 10


@pytest.fixture
def board() -> HealthBoard:
    board = HealthBoard(["one.Service"])
    board.open()
    return board


@pytest.fixture
async def stub(board: HealthBoard, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Any]:
    door = GrpcDoor(ProcessSettings(listen="127.0.0.1:0"), [])
    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        await door.listen(board, InFlight("gateway", 1 << 20, 1 << 20))
    async with grpc.aio.insecure_channel(caplog.records[-1].__dict__["fields"]["address"]) as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await door.stop(0)


async def _watch(stub: Any) -> Any:
    """A watch that has said what is now."""
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=_LIMIT_S)
    assert (await watch.read()).status == _SERVING
    return watch


async def test_a_service_is_asked_for_by_its_name(board: HealthBoard, stub: Any) -> None:
    board.set("one.Service", False)
    statuses = [
        (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_LIMIT_S)).status
        for name in ("", "one.Service")
    ]
    assert statuses == [_SERVING, _NOT_SERVING]


async def test_a_check_of_an_unknown_service_is_not_found(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=_LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_of_an_unknown_service_says_so_and_waits_for_it(board: HealthBoard, stub: Any) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="later"), timeout=_LIMIT_S)
    assert (await watch.read()).status == _UNKNOWN
    board.set("later", True)
    assert (await watch.read()).status == _SERVING


async def test_a_watch_tells_of_changes(board: HealthBoard, stub: Any) -> None:
    watch = await _watch(stub)
    board.set("", False)
    assert (await watch.read()).status == _NOT_SERVING


async def test_watches_end_without_an_error_after_they_have_told_of_draining(board: HealthBoard, stub: Any) -> None:
    watches = [await _watch(stub) for _ in range(2)]
    board.drain()
    board.end_watches()
    assert [(await watch.read()).status for watch in watches] == [_NOT_SERVING, _NOT_SERVING]
    assert [await watch.read() for watch in watches] == [grpc.aio.EOF, grpc.aio.EOF]


async def test_a_watcher_who_leaves_leaves_others_alone(board: HealthBoard, stub: Any) -> None:
    leaving, staying = await _watch(stub), await _watch(stub)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving.read()
    board.set("", False)
    assert (await staying.read()).status == _NOT_SERVING
