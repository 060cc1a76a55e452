"""Connections of the transport over nghttp2, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from neuronpipe.platform.process.life import Life
from neuronpipe.rpc import door as rpc_door
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.http2.server import Http2Server, _ServerConnection
from neuronpipe.rpc.transport import ServerOptions
from tests.interop.echo_server import Echo, EchoSettings, rpcs
from tests.interop.fuzz import MakeConnection


class _Deaf(Http2Server):
    """Listens nowhere."""

    async def listen(self) -> int:
        return 1


@asynccontextmanager
async def connections_of_echo() -> AsyncIterator[MakeConnection]:
    """What makes connections to the echo server, as it does itself for each caller. At the end no call is left."""
    servers: list[_Deaf] = []

    def make_server(options: ServerOptions) -> _Deaf:
        servers.append(_Deaf(options))
        return servers[-1]

    settings = EchoSettings()
    life = Life("echo", settings, [GrpcDoor(settings, rpcs())])
    with patch.object(rpc_door, "make_server", make_server):
        await life.listen()
    life.open(Echo().handlers())
    (server,) = servers
    yield lambda: _ServerConnection(server)
    assert not server.connections
    assert not life.in_flight.count
