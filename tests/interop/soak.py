"""Connections that come and go, half of them rude, while a server's memory is watched."""

import itertools
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.interop import frames
from tests.interop.echo_server import SERVICE
from tests.interop.fuzz import stream_of_frames
from tests.interop.run import Server

_CALLERS = 8
_LIMIT_S = 10.0
_SAMPLE_S = 0.5
_LINGER = struct.pack("ii", 1, 0)


@dataclass
class Soak:
    """`rss_mib`: samples, with their times. `failures`: of polite callers."""

    connections: Counter[str] = field(default_factory=Counter)
    rss_mib: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def growth_mib_per_hour(self, since_s: float) -> float:
        """The slope of the memory, by least squares, from so many seconds after the start."""
        points = [(at_s, mib) for at_s, mib in self.rss_mib if at_s >= since_s]
        mean_s = sum(at_s for at_s, _ in points) / len(points)
        mean_mib = sum(mib for _, mib in points) / len(points)
        above = sum((at_s - mean_s) * (mib - mean_mib) for at_s, mib in points)
        return 3600 * above / sum((at_s - mean_s) ** 2 for at_s, _ in points)


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def _polite(server: Server, chance: random.Random) -> None:
    """A few calls of every kind."""
    with server.channel() as channel:
        size = chance.choice((0, 10, 1000, 100_000))
        echo: Any = channel.unary_unary(_path("Echo"))
        split: Any = channel.unary_stream(_path("Split"))
        chat: Any = channel.stream_stream(_path("Chat"))
        assert len(echo(b"a" * size, timeout=_LIMIT_S)) == size
        assert len(list(split(b'{"count": 5, "size": 5000}', timeout=_LIMIT_S))) == 5
        assert len(list(chat(iter([b"a" * size] * 3), timeout=_LIMIT_S))) == 3


def _cancelling(server: Server, chance: random.Random) -> None:
    """Calls that are cancelled, or whose deadline passes."""
    with server.channel() as channel:
        slow: Any = channel.unary_unary(_path("Slow"))
        with suppress(grpc.RpcError):
            slow(b'{"seconds": 60}', timeout=0.02)
        split: Any = channel.unary_stream(_path("Split"))
        running = split(b'{"count": 1000, "size": 50000}', timeout=_LIMIT_S)
        next(running)
        running.cancel()


def _connect(server: Server) -> socket.socket:
    host, _, port = server.process.target.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=_LIMIT_S)
    if not server.tls:
        return plain
    context = ssl.create_default_context(cafile=str(server.tls["ca"]))
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname="localhost")


def _vanishing(server: Server, chance: random.Random) -> None:
    """A TCP connection that is reset, in the midst of calls."""
    connection = _connect(server)
    head = frames.block(frames.call_fields(_path(chance.choice(("Slow", "Join", "Split")))))
    connection.sendall(frames.PREFACE + frames.settings() + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, head))
    if chance.random() < 0.5:
        connection.sendall(
            frames.frame(frames.DATA, 0, 1, frames.message(b'{"seconds": 60}')[: chance.randrange(1, 20)])
        )
    if chance.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    connection.close()


def _unread(server: Server, chance: random.Random) -> None:
    """Responses that are never read."""
    with _connect(server) as connection:
        connection.sendall(frames.PREFACE + frames.settings([(frames.INITIAL_WINDOW_SIZE, 0)]))
        for stream in range(1, 2 * chance.choice((1, 10)), 2):
            head = frames.block(frames.call_fields(_path("Split")))
            connection.sendall(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, head))
            told = frames.message(b'{"count": 1000, "size": 50000}')
            connection.sendall(frames.frame(frames.DATA, frames.END_STREAM, stream, told))
        time.sleep(0.1)


def _mangled(server: Server, chance: random.Random) -> None:
    """Bytes that no client sends."""
    with _connect(server) as connection, suppress(OSError):
        connection.sendall(b"".join(stream_of_frames(chance)))
        connection.settimeout(0.05)
        while connection.recv(1 << 16):
            pass


def _silent(server: Server, chance: random.Random) -> None:
    """A connection, and nothing, or half a greeting."""
    with _connect(server) as connection:
        connection.sendall(frames.PREFACE[: chance.choice((0, 10, 24))])


_KINDS: tuple[Callable[[Server, random.Random], None], ...] = (
    *(_polite,) * 5,
    *(_cancelling, _vanishing, _unread, _mangled, _silent),
)


def soak(server: Server, seconds: float, seed: int) -> Soak:
    """Lets callers come and go for a time."""
    soak, began_s, is_over = Soak(), time.monotonic(), threading.Event()

    def call(number: int) -> None:
        for turn in itertools.count():
            if is_over.is_set():
                return
            chance = random.Random(f"{seed}-{number}-{turn}")
            kind = chance.choice(_KINDS)
            try:
                kind(server, chance)
            except (grpc.RpcError, AssertionError, OSError) as error:
                if kind is _polite:
                    soak.failures.append(f"{type(error).__name__}: {error}")
            soak.connections[kind.__name__.removeprefix("_")] += 1

    callers = [threading.Thread(target=call, args=(number,)) for number in range(_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        while time.monotonic() - began_s < seconds:
            soak.rss_mib.append((time.monotonic() - began_s, server.rss_mib()))
            is_over.wait(_SAMPLE_S)
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
    return soak
