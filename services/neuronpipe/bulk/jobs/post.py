"""HTTP requests of workers, by Python's own client: they follow no redirect, and go to an address that is known."""

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import urlsplit

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PORTS = {"http": 80, "https": 443}
# Public by their numbers, but they may lead to addresses inside: those of IPv4 in an older form (RFC 4291, 2765), NAT64
# (RFC 6052, 8215), Teredo, 6to4, and site-local addresses, which Python takes for public ones.
_LEADING_INSIDE = [
    ipaddress.IPv6Network(network)
    for network in ["::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10"]
]


class PostFailed(Exception):
    """There was no answer, or none that is allowed to be asked for. `status`: of HTTP, where the request is the reason,
    so that another attempt would fare no better; else 0.
    """

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a URL leads. `path` with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Destination":
        """Raises ValueError, which says what is wrong."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise ValueError("must begin with https:// or http://")
        if not parts.hostname or parts.username or parts.password or parts.fragment:
            raise ValueError("must name a host, without a user, a password or a #")
        if not url.isascii() or any(sign.isspace() or not sign.isprintable() for sign in url):
            raise ValueError("must be ASCII without spaces; other characters as %20")
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return cls(parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme], path)


async def resolve(to: Destination, allowed: Sequence[Network] | None) -> str:
    """The address of a host. `allowed`: networks that may be reached besides public addresses; None for all.

    A host with any address that may not be reached is refused. Raises PostFailed.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PostFailed("the host has no address") from error
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    if allowed is not None:
        for address in addresses:
            plain = getattr(address, "ipv4_mapped", None) or address
            if any(plain in network for network in allowed if network.version == plain.version):
                continue
            if not plain.is_global or plain.is_multicast or any(plain in network for network in _LEADING_INSIDE):
                raise PostFailed("the host has an address that is not public, and in no allowed network")
    return str(addresses[0])


async def post(
    to: Destination,
    address: str,
    headers: Mapping[str, str],
    body: bytes,
    limits: tuple[float, int],
    threads: Executor | None = None,
) -> Answer:
    """Sends a body to an address of the host. `limits`: seconds, and bytes of the answer. Raises PostFailed."""
    timeout_s, max_bytes = limits
    connection = _Pinned(to, address, timeout_s)

    def send() -> Answer:
        connection.request("POST", to.path, body, dict(headers))
        response = connection.getresponse()
        data = response.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise PostFailed(f"the answer is larger than {max_bytes} bytes, the limit", 502)
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)

    sending = asyncio.get_running_loop().run_in_executor(threads, send)
    try:
        # Of the whole exchange; the timeout of a socket is one of each part.
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(sending)
    except TimeoutError as error:
        raise PostFailed(f"no answer within {timeout_s:g} s", 504) from error
    except (OSError, http.client.HTTPException) as error:
        raise PostFailed(f"the request failed: {type(error).__name__}") from error
    finally:
        connection.cut()
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was resolved before, so that nobody can change it in between."""

    def __init__(self, to: Destination, address: str, timeout_s: float) -> None:
        super().__init__(to.host, to.port, timeout=timeout_s)
        self._pinned = address
        self._tls = ssl.create_default_context() if to.scheme == "https" else None

    def connect(self) -> None:
        """Connects to the address; the certificate must be the host's."""
        plain = socket.create_connection((self._pinned, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host) if self._tls else plain

    def cut(self) -> None:
        """Ends the exchange, also where a thread waits for it."""
        if self.sock:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.close()


def check_host(url: str, hosts: str) -> None:
    """Raises ValueError for a URL whose host is not among the allowed ones, `hosts` with commas."""
    allowed = [host.lower() for host in map(str.strip, hosts.split(",")) if host]
    if not allowed:
        raise ValueError("this gateway sends no notifications of jobs: set jobs_notification_hosts")
    host = Destination.of(url).host.lower()
    if not any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in allowed):
        raise ValueError(f"its host must be {' or '.join(allowed)}")
