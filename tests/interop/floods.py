"""Connections that send what costs them little and a server much, by the frames."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.interop import frames
from tests.interop.echo_server import SERVICE
from tests.interop.run import Server

# A server that reads nothing for so long holds the sender back.
_HELD_BACK_S = 2.0
_ANSWER_LIMIT_S = 30.0
_SENT_AT_ONCE = 500
_VICTIM_PAUSE_S = 0.01
_VICTIM_LIMIT_S = 10.0
# Of the victim's calls, each so-manieth is the first of a new connection.
_NEW_CONNECTION_EACH = 10
_MIN_VICTIM_CALLS = 11
_LAST_PING = b"the last"
_SLOW, _SPLIT, _JOIN, _CHAT = (f"/{SERVICE}/{name}" for name in ("Slow", "Split", "Join", "Chat"))


Frames = Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Flood:
    """`frames`: what is sent, one after the other, each of them what is counted. `settings`: the sender's, before.
    `reads`: whether it reads what the server sends meanwhile. `connections`: so many at once. `ends`: whether the
    server ends them.
    """

    name: str
    frames: Frames
    settings: tuple[tuple[int, int], ...] = ()
    reads: bool = True
    connections: int = 1
    ends: bool = False
    # Seconds between two of them.
    pause_s: float = 0.0
    # Seconds for which the connections stay open at the end.
    holds_s: float = 0.0
    # What each may cost the server, and all together leave in its memory.
    max_cpu_us: float = 100.0
    max_growth_mib: float = 48.0


@dataclass(slots=True)
class Attack:
    """What came of a flood. `sent`: frames. `ended`: connections that the server ended. `held_back`: those from which
    it stopped reading.
    """

    sent: int = 0
    ended: int = 0
    held_back: int = 0


@dataclass(slots=True)
class Victim:
    """A caller who does nothing wrong. `failures`: with gRPC's status and message."""

    calls: int = 0
    worst_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def _open(stream: int, path: str, *, flags: int = 0) -> bytes:
    head = frames.block(frames.call_fields(path))
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream, head)


def _data(stream: int, data: bytes) -> bytes:
    return frames.frame(frames.DATA, frames.END_STREAM, stream, frames.message(data))


def _streams(count: int) -> Iterable[int]:
    return range(1, 2 * count, 2)


def _endless_head(part: bytes, count: int) -> Iterator[bytes]:
    head = frames.block(frames.call_fields(_SLOW))
    yield frames.frame(frames.HEADERS, 0, 1, head)
    yield from itertools.repeat(frames.frame(frames.CONTINUATION, 0, 1, part), count)


def _header_bomb() -> Iterator[bytes]:
    name, value = b"x-bomb", b"a" * 3900
    head = frames.block(frames.call_fields(_SLOW))
    # Literal with incremental indexing (RFC 7541, 6.2.1); the newest entry of the table is number 62.
    entry = b"\x40" + bytes([len(name)]) + name + b"\x7f\xbd\x1d" + value
    yield frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, head + entry)
    for stream in range(3, 403, 2):
        yield frames.frame(
            frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, head + bytes([0x80 | 62]) * 15_000
        )


def _unread(count: int, told: bytes) -> Iterator[bytes]:
    for stream in _streams(count):
        yield _open(stream, _SPLIT) + _data(stream, told)


def _unread_requests(count: int) -> Iterator[bytes]:
    """Of streams whose answers wait for a window: each as long as its own window lets it be."""
    for stream in _streams(count):
        yield _open(stream, _CHAT)
        for _ in range(60):
            yield frames.frame(frames.DATA, 0, stream, frames.message(b"a" * 16_000))


def _dribble() -> Iterator[bytes]:
    yield _open(1, _SPLIT) + _data(1, b'{"count": 1, "size": 1000000}')
    yield from itertools.repeat(frames.window_update(1, 1), 20_000)


def _each(frames_of: Callable[[int], bytes]) -> Frames:
    """The frames of 10,000 streams."""
    return lambda: map(frames_of, _streams(10_000))


def _repeated(frame: bytes, count: int, first: bytes = b"") -> Frames:
    """A frame again and again, behind another one."""
    return lambda: itertools.chain([first] if first else [], itertools.repeat(frame, count))


_UNREAD = ((frames.INITIAL_WINDOW_SIZE, 0),)
_PING = frames.frame(frames.PING, payload=b"12345678")

FLOODS = (
    Flood("rapid reset", _each(lambda number: _open(number, _SLOW) + frames.reset(number)), ends=True, max_cpu_us=150),
    Flood(
        "rapid reset with a message",
        _each(lambda number: _open(number, _SLOW) + _data(number, b'{"seconds": 60}') + frames.reset(number)),
        ends=True,
        max_cpu_us=200,
    ),
    Flood(
        "resets by the server",  # CVE-2025-8671: a WINDOW_UPDATE of 0 is an error of the stream (RFC 9113, 6.9)
        _each(lambda number: _open(number, _SLOW) + frames.window_update(number, 0)),
        ends=True,
        max_cpu_us=150,
    ),
    Flood(
        "rapid reset of calls that are refused",
        _each(lambda number: _open(number, f"/{SERVICE}/Unknown") + frames.reset(number)),
        ends=True,
        max_cpu_us=150,
    ),
    Flood("CONTINUATION", lambda: _endless_head(frames.block([(b"x-field", b"a" * 16_000)]), 2000), ends=True),
    Flood("empty CONTINUATION", lambda: _endless_head(b"", 100_000), ends=True),
    Flood("SETTINGS", _repeated(frames.settings([(1, 4096), (4, 65_535)]), 50_000), ends=True),
    Flood("SETTINGS, unread", _repeated(frames.settings([(1, 0)]), 50_000), reads=False, ends=True),
    Flood("PING", _repeated(_PING, 50_000), ends=True),
    Flood("PING, unread", _repeated(_PING, 50_000), reads=False, ends=True),
    Flood("PRIORITY", _repeated(frames.frame(frames.PRIORITY, 0, 3, b"\0\0\0\1\0"), 50_000), ends=True),
    Flood("WINDOW_UPDATE", _repeated(frames.window_update(0, 1), 50_000), ends=True),
    Flood("frames of no kind", _repeated(frames.frame(200, 0, 0, b"a" * 100), 50_000), ends=True),
    Flood("empty DATA", _repeated(frames.frame(frames.DATA, 0, 1), 100_000, _open(1, _JOIN)), ends=True),
    Flood(
        "empty messages",
        _repeated(frames.frame(frames.DATA, 0, 1, frames.message(b"") * 100), 300, _open(1, _JOIN)),
        max_cpu_us=15_000,
    ),
    Flood(
        "responses that are never read",
        lambda: _unread(200, b'{"count": 1000, "size": 65536}'),
        settings=_UNREAD,
        holds_s=2.0,
        max_cpu_us=3000,
        max_growth_mib=96,
    ),
    Flood(
        "requests that are never read",
        lambda: _unread_requests(400),
        settings=_UNREAD,
        max_cpu_us=1000,
        max_growth_mib=320,  # half of what all messages may take, and what they are parts of
    ),
    Flood("responses that are read by the byte", _dribble, settings=_UNREAD, ends=True, max_cpu_us=200),
    Flood("header bomb", _header_bomb, ends=True, max_cpu_us=8000),
    Flood(
        "heads by the byte",
        lambda: (bytes([byte]) for byte in _open(1, _SLOW)),
        connections=100,
        pause_s=0.02,
        max_cpu_us=400,
    ),
    Flood("connections", lambda: [_PING], connections=500, holds_s=1.0, max_cpu_us=4000),
)


def attack(server: Server, flood: Flood) -> Attack:
    """Sends a flood, and waits until the server has dealt with it."""
    came = Attack()
    host, _, port = server.process.target.rpartition(":")
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=_HELD_BACK_S))
            for _ in range(flood.connections)
        ]
        for connection in connections:
            _greet(connection, flood.settings)
        open_still = set(connections)
        sent = iter(flood.frames())
        size = 1 if flood.connections > 1 else _SENT_AT_ONCE
        while open_still and (several := list(itertools.islice(sent, size))):
            for connection in list(open_still):
                try:
                    _send(connection, b"".join(several), reads=flood.reads)
                    came.sent += len(several)
                except TimeoutError:
                    came.held_back += 1
                    open_still.discard(connection)
                except OSError:
                    came.ended += 1
                    open_still.discard(connection)
            time.sleep(flood.pause_s)
        time.sleep(flood.holds_s)
        for connection in open_still:
            came.ended += not _answers_ping(connection)
    return came


def _greet(connection: socket.socket, settings: Iterable[tuple[int, int]]) -> None:
    """Both sides' SETTINGS, acknowledged, so that the server's windows count."""
    connection.sendall(frames.PREFACE + frames.settings(settings))
    received = b""
    while not any(kind == frames.SETTINGS for kind, *_ in frames.frames_in(received)[0]):
        received += connection.recv(1 << 16)
    connection.sendall(frames.frame(frames.SETTINGS, frames.ACK))


def _send(connection: socket.socket, data: bytes, *, reads: bool) -> None:
    """Raises TimeoutError where the server does not read, and OSError where it has ended the connection."""
    if reads:
        connection.setblocking(False)
        try:
            while connection.recv(1 << 20):
                pass
            raise ConnectionResetError
        except BlockingIOError:
            pass
        finally:
            connection.settimeout(_HELD_BACK_S)
    connection.sendall(data)


def _answers_ping(connection: socket.socket) -> bool:
    """Whether the server answers a last PING; False where it ends the connection instead. Raises TimeoutError."""
    connection.settimeout(_ANSWER_LIMIT_S)
    try:
        connection.sendall(frames.frame(frames.PING, payload=_LAST_PING))
        tail = b""
        while part := connection.recv(1 << 20):
            tail = (tail + part)[-len(_LAST_PING) - (1 << 20) :]
            if _LAST_PING in tail:
                return True
    except (BrokenPipeError, ConnectionResetError):
        pass
    return False


@contextmanager
def calling_victim(server: Server) -> Iterator[Victim]:
    """A caller whose calls go on while the block runs."""
    victim, is_over = Victim(), threading.Event()

    def call() -> None:
        with server.channel() as own:
            for number in itertools.count():
                if is_over.is_set() and victim.calls >= _MIN_VICTIM_CALLS:
                    return
                began_s = time.monotonic()
                with ExitStack() as stack:
                    is_first = number % _NEW_CONNECTION_EACH == 0
                    channel = stack.enter_context(server.channel()) if is_first else own
                    echo: Any = channel.unary_unary(f"/{SERVICE}/Echo")
                    try:
                        assert echo(b"a", timeout=_VICTIM_LIMIT_S) == b"a"
                    except grpc.RpcError as error:
                        victim.failures.append(str(error))
                victim.calls += 1
                victim.worst_s = max(victim.worst_s, time.monotonic() - began_s)
                is_over.wait(_VICTIM_PAUSE_S)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield victim
    finally:
        is_over.set()
        thread.join()
