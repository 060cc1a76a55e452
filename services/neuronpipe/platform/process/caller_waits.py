"""Waits for callers who send a message slowly, or read an answer slowly: limited in time and in number."""

import itertools
import time
from collections.abc import Callable

from neuronpipe.core.deadlines import LAST_LOOK_S, Deadlines
from neuronpipe.core.metrics import Counter

# A wait may be ended to make room once it is this old. Any network delivers a message sooner.
_PATIENCE_S = 5.0
# Stands for "no limit" where a number is needed: about thirty years.
_NO_LIMIT_S = 1e9


class CallerWaits(Deadlines):
    """Waits for callers of one kind. All have the same limit, so the first wait is always due first.

    - `limit_s`: 0: no limit.
    - `max_waits`: the maximum number of waits at once.
    - `ended`: counts the ended waits.
    """

    def __init__(self, limit_s: float, max_waits: int, ended: Counter) -> None:
        super().__init__(LAST_LOOK_S)
        self._limit_s = limit_s or _NO_LIMIT_S
        self._max_waits = max_waits
        self._ended = ended
        self._numbers = itertools.count()

    def begin(self, end: Callable[[bool], None]) -> int:
        """Begins a wait, and returns its number, for `remove`.

        `end` is called if the wait is ended: with True at the time limit, with False if another wait needs its place.
        """
        number, now_s = next(self._numbers), time.monotonic()
        self.add(number, now_s + self._limit_s, end)
        if len(self._pending) > self._max_waits:
            first = next(iter(self._pending))
            deadline_s, end_first = self._pending[first]
            if now_s - (deadline_s - self._limit_s) > _PATIENCE_S:
                del self._pending[first]
                self._ended.add()
                end_first(False)
        return number

    def end_all(self) -> None:
        while self._pending:
            self._pending.pop(next(iter(self._pending)))[1](False)

    def _end(self, expire: Callable[..., None]) -> None:
        self._ended.add()
        expire(True)
