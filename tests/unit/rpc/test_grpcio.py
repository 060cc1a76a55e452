"""rpc/grpcio.py: the connections of a port, and reads that nobody waits for."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.errors import Unavailable
from neuronpipe.rpc.grpcio import ServerCall, count_connections, end_connection, peer_address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:1234", ("127.0.0.1", 1234)),
        ("ipv6:%5B::1%5D:1234", ("::1", 1234)),
        ("unix:", None),
        ("unix:/tmp/a.sock", None),
    ],
)
def test_a_peer_is_read_as_grpc_writes_it(peer: str, address: tuple[str, int] | None) -> None:
    assert peer_address(peer) == address


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_connections_are_counted_and_one_is_ended(family: socket.AddressFamily, host: str) -> None:
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2], timeout=10) as first,
        socket.create_connection(listener.getsockname()[:2], timeout=10) as second,
        listener.accept()[0],
        listener.accept()[0] as others,
    ):
        port = listener.getsockname()[1]
        before = count_connections(port)
        name = f"[{host}]" if ":" in host else host
        end_connection(port, f"ipv{6 if ':' in host else 4}:{name}:{first.getsockname()[1]}")
        assert before == 2
        assert first.recv(1) == b""
        others.sendall(b"x")
        assert second.recv(1) == b"x"


def test_looking_leaves_no_file_open() -> None:
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    for _ in range(100):
        count_connections(1)
    assert len(list(files.iterdir())) < before + 50  # other threads may have opened some


class _Context:
    """A call of gRPC whose message never comes."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def time_remaining(self) -> None: ...

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> bytes:
        return await self.message


@pytest.mark.parametrize("ending", ["cancelled", "stopped"])
async def test_a_read_that_nobody_waits_for_ends_with_its_call(ending: str) -> None:
    context: Any = _Context()
    call = ServerCall(context)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.01)
    if ending == "cancelled":
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        call.stop_reading(Unavailable("it stops"))
        with pytest.raises(Unavailable, match="it stops"):
            await reading
    assert not context.message.cancelled()  # gRPC would never free it
    context.message.set_exception(ValueError("the call has ended"))
    await asyncio.sleep(0.01)  # an error that nobody takes would fail the test
