"""Ends what waits for callers for too long: for a message, for more of a stream, or until a response is read."""

import asyncio
import itertools
import time
from collections.abc import Callable

from neuronpipe.core.metrics import Counter

# Where too many wait, the one that has waited longest is ended; not before this time, in which any network delivers.
_PATIENCE_S = 5.0


class CallerWaits:
    """What waits in one way. As all of it may wait equally long, the first is always due first.

    `limit_s`: 0: for ever. `max_waits`: how many may wait at once. `ended`: counts those that were ended.
    """

    def __init__(self, limit_s: float, max_waits: int, ended: Counter) -> None:
        self._limit_s = limit_s
        self._max_waits = max_waits
        self._ended = ended
        self._waits: dict[int, tuple[float, Callable[[bool], None]]] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, end: Callable[[bool], None]) -> int:
        """Something waits from now on. `end` is called where it waits for too long, with whether that was the time
        limit; else another needs its place. Returns the number for `done`.
        """
        number, now_s = next(self._numbers), time.monotonic()
        self._waits[number] = now_s, end
        if len(self._waits) > self._max_waits and now_s - self._first_began_s() > _PATIENCE_S:
            self._end_first(is_late=False)
        if self._timer is None and self._limit_s:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)
        return number

    def done(self, number: int) -> None:
        """It no longer waits. May be called again."""
        self._waits.pop(number, None)

    def _look(self) -> None:
        """One timer serves all, as hardly anything waits until its limit."""
        self._timer = None
        due_s = time.monotonic() - self._limit_s
        while self._waits and self._first_began_s() <= due_s:
            self._end_first(is_late=True)
        if self._waits:
            wait_s = max(0.0, self._first_began_s() - due_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _first_began_s(self) -> float:
        return self._waits[next(iter(self._waits))][0]

    def _end_first(self, *, is_late: bool) -> None:
        _, end = self._waits.pop(next(iter(self._waits)))
        self._ended.add()
        end(is_late)
