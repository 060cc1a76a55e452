"""platform/process/listener.py: connections on their way to a protocol. Doors test the rest."""

import asyncio
import socket

from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.platform.process.listener import Listener


async def test_a_connection_that_comes_as_the_process_ends_is_closed() -> None:
    begun: list[asyncio.Protocol] = []
    ended: list[str] = []

    def begin() -> asyncio.Protocol:
        begun.append(asyncio.Protocol())
        return begun[-1]

    def refuse() -> None:
        raise AssertionError

    limits = GatewaySettings(repository="/none")
    listener = Listener("127.0.0.1:0", limits, [], begin, refuse, lambda: ended.append("handshake"))
    port = listener.bind("--listen")
    listener.listen()
    with socket.create_connection(("127.0.0.1", port), 10) as caller:
        listener.close()  # which accepts those that wait
        listener.end_handshakes()
        assert len(begun) == 1
        assert await asyncio.to_thread(caller.recv, 1) == b""
    assert (listener.handshakes, ended) == ({}, ["handshake"])
