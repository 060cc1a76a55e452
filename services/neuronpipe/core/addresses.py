"""Addresses as gRPC writes them: HOST:PORT, and unix:PATH or unix:///PATH for sockets in the file system."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# sun_path has 108 bytes, of which the last is zero (unix(7)).
_MAX_PATH_BYTES = 107
_PROBE_LIMIT_S = 2.0
LAST_PORT = 65_535


def unix_path(address: str) -> str | None:
    """Returns the path of a Unix socket's address; None for another address. Raises ValueError for an invalid path."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    path = path.removeprefix("//")
    if not path:
        raise ValueError("the path of the Unix socket is empty")
    if (size_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        raise ValueError(f"the path of a Unix socket has at most {_MAX_PATH_BYTES} bytes; this one has {size_bytes}")
    return path


def check_target(target: str) -> None:
    """Raises ValueError unless a target is HOST:PORT, with or without a scheme of gRPC, or unix:PATH."""
    if unix_path(target):
        return
    if target.startswith(("http://", "https://")):
        raise ValueError(f"{target!r} is a URL: give HOST:PORT of gRPC, such as localhost:50050")
    host, _, port = target.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT):
        raise ValueError(
            f"{target!r} does not end with a port from 1 to {LAST_PORT}: give HOST:PORT, as localhost:50050, "
            "or unix:PATH"
        )


@contextmanager
def telling_wrong_labels() -> Iterator[None]:
    """Turns Python's error about a host's name with an empty or overlong label into the error of other unknown names,
    which is an OSError.
    """
    try:
        yield
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "no such name") from error


def is_listened_on(path: str) -> bool:
    """Returns whether a process listens on a Unix socket. A killed process leaves the file of its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # the socket has no room for another connection, or this process may open none
            return True
        return True


def is_reachable(address: str) -> bool:
    """Returns whether a connection to an address can be made; True for a scheme that only gRPC can resolve."""
    if path := unix_path(address):
        return is_listened_on(path)
    host, _, port = address.rpartition(":")
    if not host or "/" in host:
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_LIMIT_S):
            return True
    except (OSError, ValueError):
        return False


def is_loopback(address: str) -> bool:
    """Returns whether only this machine reaches an address. Names other than localhost may change, and do not count."""
    if unix_path(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
