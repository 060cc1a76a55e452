"""The connections of a gRPC port, as the operating system shows them to its own process.

gRPC's Python API can neither count connections nor end one.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

_OPEN_FILES = Path("/proc/self/fd")


def count_connections(port: int) -> int:
    """How many connections of a port are open."""
    return sum(1 for _ in _connections(port))


def end_connection(port: int, peer: str) -> None:
    """Ends the connection of a peer, as gRPC's contexts name it. gRPC then cancels its calls."""
    for connection in _connections(port):
        if _name(connection) == peer_address(peer):
            with contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)


def peer_address(peer: str) -> tuple[str, int] | None:
    """The address and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; None of other kinds."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


def _connections(port: int) -> Iterator[socket.socket]:
    """Copies of the sockets of connections to a port, each open until the next one."""
    if not _OPEN_FILES.is_dir():  # other systems than Linux
        return
    for file in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError), _copy(int(file.name)) as copy:  # closed meanwhile, or one that listens
            if copy.getsockname()[1:2] == (port,) and copy.getpeername():
                yield copy


def _copy(number: int) -> socket.socket:
    """A copy of an open file that is a socket. Raises OSError for others."""
    copied = os.dup(number)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


def _name(connection: socket.socket) -> tuple[str, int]:
    host, port = connection.getpeername()[:2]
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), port
