"""rpc/client.py: a client shows its current certificate, and calls end over the connection that they began on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from neuronpipe.core.errors import SetupError
from neuronpipe.platform.tls import ServerTls, TlsFiles
from neuronpipe.rpc import client as rpc_client
from neuronpipe.rpc.client import ServiceConnection
from tests.servers.certificates import Authority, peer_names, replace, server_credentials
from tests.suite.waiting import happens

_AUTHORITY = Authority()
_LIMIT_S = 20


class _Server:
    """Tells callers their names, at once or when it is let."""

    def __init__(self, folder: Path) -> None:
        replace(folder / "ca.crt", _AUTHORITY.certificate)
        _AUTHORITY.issue().write(folder)
        self.target = ""
        self.waiting = 0
        self.may_answer = asyncio.Event()
        files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        self._server = grpc.aio.server()
        methods: dict[str, Any] = {"Tell": grpc.unary_unary_rpc_method_handler(self._tell)}
        methods["Wait"] = grpc.unary_unary_rpc_method_handler(self._wait)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
        port = self._server.add_secure_port("127.0.0.1:0", server_credentials(ServerTls(files)))
        self.target = f"127.0.0.1:{port}"
        self.start, self.stop = self._server.start, self._server.stop

    async def _tell(self, request: bytes, context: Any) -> bytes:
        return " ".join(peer_names(context)).encode()

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.waiting += 1
        await self.may_answer.wait()
        return await self._tell(request, context)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[_Server]:
    running = _Server(tmp_path)
    await running.start()
    yield running
    await running.stop(0)


class _Stubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.tell: Any = channel.unary_unary("/a.Service/Tell")
        self.wait: Any = channel.unary_unary("/a.Service/Wait")


@pytest_asyncio.fixture
async def connection(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServiceConnection[_Stubs]]:
    """A connection that looks at its files before each call."""
    monkeypatch.setattr(rpc_client, "LOOK_EVERY_S", 0)
    replace(tmp_path / "ca.crt", _AUTHORITY.certificate)
    _AUTHORITY.issue("first.example").write(tmp_path / "client")
    files = TlsFiles(tmp_path / "client" / "tls.crt", tmp_path / "client" / "tls.key", tmp_path / "ca.crt")
    opened = ServiceConnection(server.target, _Stubs, tls=files)
    yield opened
    await opened.close()


async def _tell(connection: ServiceConnection[_Stubs]) -> bytes:
    with connection.use() as stubs:
        names: bytes = await stubs.tell(b"", timeout=_LIMIT_S)
        return names


async def _wait(connection: ServiceConnection[_Stubs]) -> bytes:
    with connection.use() as stubs:
        names: bytes = await stubs.wait(b"", timeout=_LIMIT_S)
        return names


async def test_new_calls_show_the_new_certificate_and_old_ones_are_answered(
    server: _Server, connection: ServiceConnection[_Stubs], tmp_path: Path
) -> None:
    with connection.use() as stubs:
        first = stubs.channel
    old = asyncio.create_task(_wait(connection))
    await happens(lambda: server.waiting == 1)
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    assert await _tell(connection) == b"second.example"
    assert not old.done()
    server.may_answer.set()
    assert await old == b"first.example"
    await happens(lambda: first.get_state() == grpc.ChannelConnectivity.SHUTDOWN)


async def test_the_last_good_certificate_stays_in_use(connection: ServiceConnection[_Stubs], tmp_path: Path) -> None:
    assert await _tell(connection) == b"first.example"
    (tmp_path / "client" / "tls.key").write_bytes(_AUTHORITY.issue().key)
    assert await _tell(connection) == b"first.example"
    _AUTHORITY.issue("expired.example", days=(-2, -1)).write(tmp_path / "client")
    assert await _tell(connection) == b"first.example"
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    assert await _tell(connection) == b"second.example"


async def test_closing_ends_calls_that_are_left_from_an_older_certificate(
    server: _Server, connection: ServiceConnection[_Stubs], tmp_path: Path
) -> None:
    old = asyncio.create_task(_wait(connection))
    await happens(lambda: server.waiting == 1)
    _AUTHORITY.issue("second.example").write(tmp_path / "client")
    await _tell(connection)
    await connection.close()
    with pytest.raises(asyncio.CancelledError):
        await old


async def test_a_client_with_files_that_cannot_be_used_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        ServiceConnection("127.0.0.1:1", _Stubs, tls=TlsFiles(ca=tmp_path / "missing.crt"))
