"""HTTP requests of workers on the event loop: they follow no redirect, and go to a known address."""

import asyncio
import http.client
import io
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from neuronpipe.core.addresses import telling_wrong_labels
from neuronpipe.core.units import words_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PORTS = {"http": 80, "https": 443}
_MAX_HEAD_BYTES = 64 << 10
# Networks that are public by their numbers, but may lead to private addresses: IPv4 in an older form (RFC 4291, 2765),
# NAT64 (RFC 6052, 8215), Teredo, 6to4, and site-local addresses, which Python counts as public.
_LEADING_INSIDE = [
    ipaddress.IPv6Network(network)
    for network in ["::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10"]
]


class PostFailed(Exception):
    """There was no answer, or the request is not allowed. `status`: the HTTP status of the failure if the request is
    its reason, so that another attempt cannot succeed; otherwise 0.
    """

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Destination:
    """The target of a URL. `path`: with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Destination":
        """Parses a URL. Raises ValueError, which names the problem."""
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
    """Resolves a host's address. `allowed`: networks that may be reached in addition to public addresses; None for all.

    A host with any address that may not be reached is refused. Raises PostFailed.
    """
    try:
        with telling_wrong_labels():
            entries = await asyncio.get_running_loop().getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PostFailed("the host has no address") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    if allowed is not None:
        for address in addresses:
            plain = getattr(address, "ipv4_mapped", None) or address
            if any(plain in network for network in allowed if network.version == plain.version):
                continue
            if not plain.is_global or plain.is_multicast or any(plain in network for network in _LEADING_INSIDE):
                raise PostFailed("the host has an address that is not public, and in no allowed network")
    return str(addresses[0])


async def post(
    to: Destination, address: str, headers: Mapping[str, str], body: bytes, *, timeout_s: float, max_bytes: int
) -> HttpAnswer:
    """Sends a body to an address of the host. `max_bytes`: limit of the answer. Raises PostFailed.

    Uses no thread: the call never waits for a thread, and after a cancellation nothing is sent.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _exchange(to, address, headers, body, max_bytes)
    except TimeoutError as error:
        raise PostFailed(f"no answer within {timeout_s:g} s", 504) from error
    except (OSError, EOFError, ValueError, http.client.HTTPException) as error:
        raise PostFailed(f"the request failed: {type(error).__name__}") from error
    if len(answer.body) > max_bytes:
        raise PostFailed(f"the answer is larger than {max_bytes} bytes, the limit", 502)
    return answer


async def _exchange(
    to: Destination, address: str, headers: Mapping[str, str], body: bytes, max_bytes: int
) -> HttpAnswer:
    # The address was resolved and checked before, so that DNS cannot change it now. The certificate must be the host's.
    tls: dict[str, Any] = {"ssl": _public_tls(), "server_hostname": to.host} if to.scheme == "https" else {}
    reader, writer = await asyncio.open_connection(address, to.port, **tls)
    try:
        host = f"[{to.host}]" if ":" in to.host else to.host
        lines = {
            "Host": host if to.port == _PORTS[to.scheme] else f"{host}:{to.port}",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Length": len(body),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        if head.count("\n") != len(lines):
            raise ValueError("a header has a line break")
        writer.writelines([f"POST {to.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1"), body])
        return await _read_answer(reader, max_bytes)  # the answer may come before the whole body is sent
    finally:
        writer.transport.abort()


@cache
def _public_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _read_answer(reader: asyncio.StreamReader, max_bytes: int) -> HttpAnswer:
    """Reads an answer, with at most `max_bytes` + 1 bytes of body. Raises EOFError, ValueError or HTTPException."""
    status = 0
    while not 200 <= status < 600:  # other statuses come before the answer
        version, code, *_ = (await reader.readline()).split(maxsplit=2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError("is not HTTP/1")
        status, head = int(code), b""
        while line := (await reader.readline()).rstrip():
            head += line + b"\r\n"
            if len(head) > _MAX_HEAD_BYTES:
                raise ValueError("has too many headers")
    headers = {name.lower(): value for name, value in http.client.parse_headers(io.BytesIO(head)).items()}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = bytearray()
        while len(body) <= max_bytes and (size := int((await reader.readline()).partition(b";")[0], 16)):
            body += await _read(reader, size, max_bytes - len(body))
            await reader.readline()
        return HttpAnswer(status, headers, bytes(body))
    size = 0 if status in (204, 304) else int(headers.get("content-length", -1))
    return HttpAnswer(status, headers, await _read(reader, size, max_bytes))


async def _read(reader: asyncio.StreamReader, size: int, most: int) -> bytes:
    """Reads `size` bytes, but at most `most` + 1; with a negative size, all until the connection ends."""
    try:
        return await reader.readexactly(min(size, most + 1) if size >= 0 else most + 1)
    except asyncio.IncompleteReadError as error:
        if size >= 0:
            raise
        return error.partial


def check_host(url: str, hosts: str) -> None:
    """Raises ValueError if the URL's host is not allowed. `hosts`: the allowed hosts, with commas."""
    allowed = words_of(hosts.lower())
    if not allowed:
        raise ValueError("this gateway sends no notifications of jobs: set jobs_notification_hosts")
    host = Destination.of(url).host.lower()
    if not any(host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:])) for pattern in allowed):
        raise ValueError(f"its host must be {' or '.join(allowed)}")
