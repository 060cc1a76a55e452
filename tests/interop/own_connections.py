"""Connections of the transport over nghttp2, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from neuronpipe.platform.process.life import Life
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.http2.server import Http2Server, _ServerConnection
from tests.interop.echo_server import SERVICE, Echo
from tests.interop.fuzz import MakeConnection


@asynccontextmanager
async def connections_of_echo() -> AsyncIterator[MakeConnection]:
    """What makes connections to the echo server, as it does itself for each caller. At the end no call is left."""
    settings = ProcessSettings(listen="127.0.0.1:0")
    door = GrpcDoor(settings, [SERVICE])
    life = Life("echo", settings, [door])
    await life.listen()
    life.open(partial(door.open, Echo().handlers()))
    server = door._server
    assert isinstance(server, Http2Server)
    try:
        yield lambda: _ServerConnection(server)
        assert not server.connections
        assert not life.in_flight.count
    finally:
        await life.stop()
