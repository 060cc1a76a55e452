"""Connections of the transport over nghttp2, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from neuronpipe.platform.process.life import Life
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.http2.server import Http2Server, _ServerConnection
from tests.interop.echo_server import Echo, EchoSettings, rpcs
from tests.interop.fuzz import MakeConnection


async def _listen_nowhere(server: Http2Server) -> int:
    return 1


@asynccontextmanager
async def connections_of_echo() -> AsyncIterator[MakeConnection]:
    """What makes connections to the echo server, as it does itself for each caller. At the end no call is left."""
    settings = EchoSettings()
    door = GrpcDoor(settings, rpcs())
    life = Life("echo", settings, [door])
    with patch.object(Http2Server, "listen", _listen_nowhere):
        await life.listen()
    life.open(Echo().handlers())
    server = door._server
    assert isinstance(server, Http2Server)
    yield lambda: _ServerConnection(server)
    assert not server.connections
    assert not life.in_flight.count
