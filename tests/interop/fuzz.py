"""Byte streams that no client sends, for the connection of a server that is in this process."""

import asyncio
import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.fuzz.messages import change_bytes
from tests.interop import frames
from tests.interop.echo_server import METHODS, SERVICE

MakeConnection = Callable[[], asyncio.Protocol]

# Turns of the event loop after which an ended connection must have no task left.
_TURNS = 200
_LOGGER = "neuronpipe"
_MAX_FRAME_BYTES = 16_384
_PATHS = (*(f"/{SERVICE}/{name}" for name in METHODS), "/grpc.health.v1.Health/Watch", "/none", "", "*")
_METADATA = (
    *((b"grpc-timeout", value) for value in (b"1S", b"0n", b"123456789S", b"-1S")),
    *((b"grpc-encoding", value) for value in (b"gzip", b"lzw")),
    *((b"x-bytes-bin", value) for value in (b"AAEC", b"!")),
    (b"X-Upper", b"a"),
    (b":path", b"/twice"),
    (b"connection", b"close"),
    (b"content-length", b"7"),
    (b"content-type", b"text/plain"),
    (b"expect", b"100-continue"),
    (b"x-long", b"a" * 20_000),
    (b"", b""),
    (b"x-none", b"\x00\r\n\xff"),
)
_BODIES = (
    b"",
    *map(frames.message, (b"", b"a", b'{"count": 3, "size": 70000}', b'{"seconds": 0}')),
    frames.message(b'{"error": "ModelNotFound", "arguments": ["no"]}'),
    frames.message(b"a") * 40,
    frames.message(b"cut short")[:-3],
    frames.message(b"no gzip", flag=1),
    frames.message(b"a", flag=7),
    b"\0\xff\xff\xff\xff",
    b"\0\0\0\0",
    frames.message(b"a" * 9000),
)


class Fault(AssertionError):
    """A connection did what none may do. `data`: the pieces that it was given."""


class FakeTransport(asyncio.Transport):
    """The other end of a connection. `written`: what the server sent."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._protocol = protocol
        self._is_closing = False
        self.is_lost = False
        self.is_paused = False
        self.written = bytearray()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_lost:
            return
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        return

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self.is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.end(None)

    def abort(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Ends the connection, as asyncio does: later, and once."""
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        self.is_lost = True
        self._protocol.connection_lost(error)


def stream_of_frames(chance: random.Random) -> list[bytes]:
    """The frames of some calls, some of them dropped, repeated, made up, moved and changed."""
    made = [frames.settings(chance.choice(((), ((frames.INITIAL_WINDOW_SIZE, chance.choice((0, 1, 70_000))),))))]
    for number in range(chance.choice((1, 1, 2, 3, 8))):
        made += _call(chance, 2 * number + 1)
    made += [_made_up(chance) for _ in range(chance.choice((0, 0, 0, 0, 0, 1, 3)))]
    if chance.random() < 0.5:
        made.insert(chance.randrange(1, len(made) + 1), frames.frame(frames.SETTINGS, frames.ACK))
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 4))):
        _change(made, chance)
    return [frames.PREFACE if chance.random() < 0.98 else change_bytes(frames.PREFACE, chance), *made]


def _call(chance: random.Random, stream: int) -> list[bytes]:
    metadata = chance.sample(_METADATA, chance.choice((0, 0, 0, 1, 2)))
    fields = frames.call_fields(chance.choice(_PATHS), *metadata)
    if chance.random() < 0.1:
        del fields[chance.randrange(len(fields))]
    block, body = frames.block(fields), chance.choice(_BODIES)
    ends_at_once = frames.END_STREAM if chance.random() < 0.1 else 0
    if chance.random() < 0.85:
        parts = [block[place : place + _MAX_FRAME_BYTES] for place in range(0, len(block), _MAX_FRAME_BYTES)]
    else:
        cut = chance.randrange(len(block))
        parts = [block[:cut], block[cut:]]
    made = [
        frames.frame(
            frames.CONTINUATION if number else frames.HEADERS,
            (0 if number else ends_at_once) | (frames.END_HEADERS if number == len(parts) - 1 else 0),
            stream,
            part,
        )
        for number, part in enumerate(parts)
    ]
    for place in range(0, len(body) or 1, size := chance.choice((1000, _MAX_FRAME_BYTES, 7))):
        is_last = place + size >= len(body)
        ends = frames.END_STREAM if is_last and chance.random() < 0.9 else 0
        made.append(frames.frame(frames.DATA, ends, stream, body[place : place + size]))
        if len(made) > 40:
            break
    if chance.random() < 0.2:
        trailers = frames.block([(b"x-trailer", b"a")])
        made.append(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, trailers))
    if chance.random() < 0.2:
        made.append(frames.reset(stream, chance.choice((0, 1, 8, 99))))
    if chance.random() < 0.5:
        increment = chance.choice((1, 1000, 1 << 20)) if chance.random() < 0.95 else chance.choice((0, 0x7FFFFFFF))
        made.append(frames.window_update(chance.choice((0, stream)), increment))
    return made


def _made_up(chance: random.Random) -> bytes:
    kind = chance.choice((*range(10), 10, 255))
    payload = chance.choice((b"", b"\0" * 4, b"\0" * 5, b"\0" * 6, b"\0" * 8, chance.randbytes(chance.randrange(40))))
    return frames.frame(kind, chance.randrange(256), chance.choice((0, 1, 2, 3, 5, 1001, 0x7FFFFFFF)), payload)


def _change(made: list[bytes], chance: random.Random) -> None:
    place = chance.randrange(len(made))
    match chance.randrange(7):
        case 0:
            del made[place]
            made.append(_made_up(chance))
        case 1:
            made[place:place] = [made[place]] * chance.choice((1, 2, 50))
        case 2:
            made.insert(chance.randrange(len(made) + 1), _made_up(chance))
        case 3:
            made[place], made[-1] = made[-1], made[place]
        case 4:
            made[place] = change_bytes(made[place], chance)
        case 5 if made[place]:  # its head: length, kind, flags, stream
            changed = bytearray(made[place])
            changed[chance.randrange(min(9, len(changed)))] ^= 1 << chance.randrange(8)
            made[place] = bytes(changed)
        case 6:
            del made[place:]
            made.append(frames.frame(frames.GOAWAY, 0, 0, b"\0" * 8))


def pieces_of(data: bytes, chance: random.Random) -> list[bytes]:
    """The same bytes as a socket may give them."""
    kind = chance.random()
    if kind < 0.5:
        return [data]
    size = chance.choice((1, 9, 30, 1000)) if kind < 0.6 else chance.randrange(20, 3000)
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    return [*pieces[:60], b"".join(pieces[60:])] if len(pieces) > 60 else pieces


class ConnectionFuzzer(logging.Handler):
    """Gives byte streams to connections. `check_at_rest` must be asked at the end."""

    def __init__(self, make_connection: MakeConnection) -> None:
        super().__init__(logging.ERROR)
        self._make = make_connection
        self._alive: list[weakref.ref[asyncio.Protocol]] = []
        # What the event loop was told of, and what went into the log.
        self._reported: list[str] = []
        # Kinds of frames, of all that connections sent.
        self.written: Counter[int] = Counter()

    async def __aenter__(self) -> "ConnectionFuzzer":
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self._reported.append(str(context)))
        logging.getLogger(_LOGGER).addHandler(self)
        return self

    async def __aexit__(self, *raised: object) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)
        asyncio.get_running_loop().set_exception_handler(None)

    def emit(self, record: logging.LogRecord) -> None:
        """A fault is in the log."""
        self._reported.append(self.format(record))

    async def give(self, chance: random.Random) -> None:
        """One connection, one stream of bytes. Raises Fault."""
        data = b"".join(stream_of_frames(chance))
        pieces = pieces_of(data, chance)
        try:
            await self._give(pieces, chance)
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}; after {b''.join(pieces).hex(' ', 16)}") from error

    async def _give(self, pieces: list[bytes], chance: random.Random) -> None:
        connection = self._make()
        if len(self._alive) >= 1000:
            self._alive = [reference for reference in self._alive if reference() is not None]
        self._alive.append(weakref.ref(connection))
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        for piece in pieces:
            if transport.is_lost or transport.is_closing():
                break
            connection.data_received(piece)
            match chance.randrange(8):
                case 0:
                    connection.pause_writing()
                    await _turns(chance.randrange(4))
                    connection.resume_writing()
                case 1 | 2 | 3:
                    await _turns(chance.randrange(6))
        match chance.randrange(4):
            case 0 | 1:
                await _turns(20)
            case 2:
                if not transport.is_closing() and not connection.eof_received():
                    transport.close()
        transport.end(chance.choice((None, ConnectionResetError())))
        del connection
        for _ in range(_TURNS):
            if transport.is_lost and len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"
        assert not self._reported, f"a fault is in the log: {self._reported}"
        written, rest = frames.frames_in(bytes(transport.written))
        assert not rest or len(rest) < _MAX_FRAME_BYTES + 9, "what was written is not made of frames"
        assert all(len(payload) <= _MAX_FRAME_BYTES for _, _, _, payload in written)
        self.written.update(kind for kind, _, _, _ in written)
        assert not written or written[0][0] == frames.SETTINGS, "the first frame is not SETTINGS (RFC 9113, 3.4)"

    async def check_at_rest(self, limit_s: float = 10.0) -> None:
        """No connection is kept. Raises Fault."""
        ends_s = asyncio.get_running_loop().time() + limit_s
        while True:
            gc.collect()
            kept = sum(reference() is not None for reference in self._alive)
            if not kept:
                return
            if asyncio.get_running_loop().time() > ends_s:
                raise Fault(f"{kept} connections are kept after they have ended")
            await asyncio.sleep(0.05)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
