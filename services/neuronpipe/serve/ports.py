"""Ports that several processes listen on."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from neuronpipe.core.errors import SetupError


class SharedPort:
    """A port for processes that all listen with SO_REUSEPORT: the kernel gives each new connection to one of them.

    `address`: HOST:PORT, with the number of a free port where 0 was asked for; "" for none.
    """

    def __init__(self, address: str, sockets: list[socket.socket]) -> None:
        self.address = address
        self._sockets = sockets

    def check_unused(self) -> None:
        """Raises SetupError where a process listens on it, which SO_REUSEPORT alone would allow."""
        for held in self._sockets:
            _bind(self.address, held.family, held.getsockname(), is_shared=False).close()


@contextmanager
def shared_port(listen: str) -> Iterator[SharedPort]:
    """Keeps a port from others for the block: bound, but without taking connections. Raises SetupError."""
    if not listen:
        yield SharedPort("", [])
        return
    host, _, text = listen.rpartition(":")
    port = int(text)
    try:
        found: list[Any] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(f"cannot listen on {listen}: {error.strerror}") from error
    with ExitStack() as stack:
        sockets = []
        for family, _, _, _, where in found:
            _bind(listen, family, (where[0], port, *where[2:]), is_shared=False).close()
            held = stack.enter_context(_bind(listen, family, (where[0], port, *where[2:]), is_shared=True))
            port = held.getsockname()[1]
            sockets.append(held)
        yield SharedPort(f"{host}:{port}", sockets)


def _bind(listen: str, family: int, where: Any, *, is_shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # To bind beside closed connections and sockets that do not listen; with the second also beside those that do.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise SetupError(f"cannot listen on {listen}: {error.strerror}") from error
    return bound
