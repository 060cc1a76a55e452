"""Ports for servers that tests start."""

import contextlib
import random
import socket

# Below the ports that the kernel gives to outgoing connections.
_PORTS = range(20_000, 32_000)
_given: set[int] = set()


def free_port() -> int:
    """Returns a port of the loopback interface on which no process listens.

    The port stays free until a server uses it, and while that server starts again: no outgoing connection gets it, and
    this process gets another port at each call.
    """
    while True:
        port = random.choice(_PORTS)
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
