"""rpc/door.py at unix sockets: files that come, go, stay behind, or belong to somebody else."""

import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from neuronpipe.api.v1 import models_pb2
from neuronpipe.api.v1.models_pb2 import ListModelsRequest, ListModelsResponse
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceStub
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.process.life import Life
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.rpcs import Context, Rpc

_SERVICE = models_pb2.DESCRIPTOR.services_by_name["ModelService"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's, which pytest's own may not be."""
    with TemporaryDirectory(prefix="np-") as name:
        yield Path(name)


@pytest.fixture
def socket_file(folder: Path) -> Path:
    return folder / "door.sock"


async def _list_models(request: ListModelsRequest, context: Context) -> ListModelsResponse:
    return ListModelsResponse()


@asynccontextmanager
async def _listening(path: Path) -> AsyncIterator[Life]:
    settings = ProcessSettings(listen=f"unix:{path}")
    door = GrpcDoor(settings, [_SERVICE.full_name])
    life = Life("door", settings, [door])
    try:
        await life.listen()
        life.open(partial(door.open, [(Rpc.of(_SERVICE.methods_by_name["ListModels"]), _list_models)]))
        yield life
    finally:
        await life.stop()


async def _ask(target: str) -> None:
    async with open_channel(target) as channel:
        await ModelServiceStub(channel).ListModels(ListModelsRequest(), timeout=10)


async def test_a_socket_is_there_while_its_door_is(socket_file: Path) -> None:
    async with _listening(socket_file):
        assert socket_file.is_socket()
        for target in (f"unix:{socket_file}", f"unix://{socket_file}"):
            await _ask(target)
    assert not socket_file.exists()


async def test_the_umask_decides_who_may_connect(socket_file: Path) -> None:
    before = os.umask(0o077)
    try:
        async with _listening(socket_file):
            assert stat.S_IMODE(socket_file.stat().st_mode) == 0o700
    finally:
        os.umask(before)


async def test_a_socket_that_a_killed_process_left_behind_is_replaced(socket_file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(socket_file))
        killed.listen()
    assert socket_file.exists()
    async with _listening(socket_file):
        await _ask(f"unix:{socket_file}")


async def test_a_socket_that_somebody_listens_on_is_left_to_them(socket_file: Path) -> None:
    async with _listening(socket_file):
        problem = f"^--listen: cannot listen on unix:{socket_file}: Address already in use$"
        with pytest.raises(SetupError, match=problem):
            async with _listening(socket_file):
                pass
        await _ask(f"unix:{socket_file}")
    assert not socket_file.exists()


async def test_a_socket_whose_owner_has_no_room_for_another_connection_is_in_use(socket_file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as waiting:
        owner.bind(str(socket_file))
        owner.listen(0)
        waiting.connect(str(socket_file))
        with pytest.raises(SetupError, match=r"Address already in use$"):
            async with _listening(socket_file):
                pass
        assert socket_file.exists()


async def test_a_file_that_is_no_socket_is_not_deleted(socket_file: Path) -> None:
    socket_file.write_text("a diary")
    with pytest.raises(SetupError, match=f"^--listen: cannot listen on unix:{socket_file}: Address already in use$"):
        async with _listening(socket_file):
            pass
    assert socket_file.read_text() == "a diary"


async def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    missing = folder / "missing" / "door.sock"
    with pytest.raises(SetupError, match=f"^--listen: cannot listen on unix:{missing}: No such file or directory$"):
        async with _listening(missing):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_that_is_not_writable_is_named(folder: Path, socket_file: Path) -> None:
    folder.chmod(0o500)
    with pytest.raises(SetupError, match=f"^--listen: cannot listen on unix:{socket_file}: Permission denied$"):
        async with _listening(socket_file):
            pass


async def test_callers_are_told_that_nobody_listens(socket_file: Path) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _ask(f"unix:{socket_file}")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
