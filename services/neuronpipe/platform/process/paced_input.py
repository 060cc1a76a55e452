"""The pace at which connections parse their input: in pieces, and in turns, so that no caller holds up the others."""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

# Limits of one turn of the event loop: the time for reading, the new calls of all connections, and the new calls of one
# connection while others wait. An answer takes half a dozen turns, so turns must be short.
_TURN_S = 0.005
_CALLS_A_TURN, _CALLS_OF_CONNECTION = 32, 8
# A parser gets pieces of the first size, and larger pieces while they contain only parts of bodies.
_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 10, 16 << 10


class LoopTurns:
    """Distributes each turn of the event loop over connections.

    Data beyond the limits of a turn waits for the next turn. Otherwise a caller with thousands of calls or frames would
    hold up all others. After a turn that used all its time, the waiting connections rest for the same time, in which
    threads compute.
    """

    def __init__(self) -> None:
        self._left, self._left_s = 0, 0.0
        self._is_open = self._is_resting = False
        self._waiting: dict[Callable[[], None], None] = {}

    def has_room(self, calls: int) -> bool:
        """Returns whether this turn has room for more input of a connection, of which `calls` calls began in this turn.

        Begins a turn if none has begun, and a rest if the time of the turn is used up.
        """
        if not self._is_open:
            self._open()
        if self._left_s > 0:
            return self._left > 0 and (calls < _CALLS_OF_CONNECTION or not self._waiting)
        if not self._is_resting:
            self._is_resting = True
            asyncio.get_running_loop().call_later(_TURN_S, self._end_rest, context=Context())
        return False

    def take(self, calls: int, began_s: float) -> None:
        """Subtracts what a piece used of the turn: the time since `began_s`, and `calls` new calls."""
        self._left -= calls
        self._left_s -= time.monotonic() - began_s

    def wait(self, resume: Callable[[], None]) -> None:
        """Calls `resume` in a later turn."""
        self._waiting[resume] = None
        self._open()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open, self._left, self._left_s = True, _CALLS_A_TURN, _TURN_S
            # An empty context instead of the context of the call whose end has made room.
            asyncio.get_running_loop().call_soon(self._end, context=Context())

    def _end(self) -> None:
        """Ends a turn. The next turn begins with the waiting connections, and keeps half for connections that receive
        data then.
        """
        self._is_open = False
        for resume in [] if self._is_resting else list(self._waiting):
            self._open()
            if self._left <= _CALLS_A_TURN // 2 or self._left_s <= _TURN_S / 2:
                return
            del self._waiting[resume]
            resume()

    def _end_rest(self) -> None:
        self._is_resting = False
        self._open()


class PieceParser(Protocol):
    """A connection that parses its input in pieces."""

    def can_parse(self) -> bool:
        """Returns whether the connection can parse a piece now."""

    def parse(self, piece: bytes) -> bool:
        """Parses a piece. Returns whether the next piece may be larger."""

    def parse_input(self) -> None:
        """Parses the waiting bytes, by `PacedInput.parse_by`."""


class PacedInput:
    """The received bytes of a connection that are not parsed yet, and the reading of more.

    - `waiting`: the bytes, which wait for a turn, or until the connection can parse again.
    - `calls`: number of calls that have begun, which the connection counts.
    """

    def __init__(self, turns: LoopTurns, transport: asyncio.Transport) -> None:
        self.waiting, self.calls = b"", 0
        self._turns, self._transport = turns, transport
        self._is_paused = False

    def parse_by(self, parser: PieceParser) -> None:
        """Passes the waiting bytes to a parser while this turn has room. A later turn continues with `parse_input`."""
        turns, waiting, calls_before, begin, size = self._turns, self.waiting, self.calls, 0, _PIECE_BYTES
        while begin < len(waiting) and parser.can_parse():
            calls, began_s = self.calls, time.monotonic()
            if not turns.has_room(calls - calls_before):
                turns.wait(parser.parse_input)
                break
            may_grow = parser.parse(waiting[begin : begin + size])
            turns.take(self.calls - calls, began_s)
            begin += size
            size = min(2 * size, _MAX_PIECE_BYTES) if may_grow and self.calls == calls else _PIECE_BYTES
        self.waiting = waiting[begin:]

    def regulate(self, *, is_full: bool) -> None:
        """Stops reading from the transport while the connection is full, and then reads again."""
        if is_full != self._is_paused and not self._transport.is_closing():
            self._is_paused = is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
