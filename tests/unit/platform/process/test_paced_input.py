"""Input that connections parse in pieces, within turns of the event loop."""

import asyncio

import pytest

from neuronpipe.platform.process import paced_input
from neuronpipe.platform.process.paced_input import LoopTurns, PacedInput
from tests.interop.fuzz import FakeTransport
from tests.suite.waiting import happens

_CALL = b"c"


class _Parser(asyncio.Protocol):
    """Takes each byte `c` for a call, and `h` for a head. `pieces`: the pieces that were parsed."""

    def __init__(self, turns: LoopTurns) -> None:
        self.transport = FakeTransport(self)
        self.input = PacedInput(turns, self.transport)
        self.pieces: list[bytes] = []
        self.is_busy = False

    def receive(self, data: bytes) -> None:
        self.input.waiting += data
        self.parse_input()

    def parse_input(self) -> None:
        self.input.parse_by(self)
        self.input.regulate(is_full=bool(self.input.waiting))

    def can_parse(self) -> bool:
        return not self.is_busy

    def parse(self, piece: bytes) -> bool:
        self.pieces.append(piece)
        self.input.calls += piece.count(_CALL)
        return b"h" not in piece


async def test_pieces_grow_within_bodies_and_are_small_after_a_call_or_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_input, "_TURN_S", 60.0)  # all in one turn
    kib = b" " * 1024
    parser = _Parser(LoopTurns())
    parser.receive(_CALL + kib * 8 + b"h" + kib * 10)
    # The call is in the first piece, and the head in the fifth, because 1 + 1 + 2 + 4 KiB come before it.
    assert [len(piece) for piece in parser.pieces] == [1024, 1024, 2048, 4096, 8192, 1024, 1024 + 2]
    assert not parser.input.waiting


async def test_calls_beyond_a_turn_wait_for_the_next_turn_and_stop_the_reading() -> None:
    turns = LoopTurns()
    parser = _Parser(turns)
    parser.receive((_CALL + b" " * 1023) * 100)
    assert 0 < parser.input.calls < 100
    assert not parser.transport.is_reading()
    await happens(lambda: parser.input.calls == 100)
    assert parser.transport.is_reading()


async def test_bytes_wait_until_a_connection_can_parse_again() -> None:
    parser = _Parser(LoopTurns())
    parser.is_busy = True
    parser.receive(b"abc")
    await asyncio.sleep(0.02)  # to prove that nothing happens
    assert (parser.pieces, parser.transport.is_reading()) == ([], False)
    parser.is_busy = False
    parser.parse_input()
    assert (parser.pieces, parser.transport.is_reading()) == ([b"abc"], True)
