"""A circuit breaker (M. Nygard, Release It!): what failed is left alone for a while, and tried by one probe before it is used again."""

import time
from collections.abc import Callable

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0


class Breaker:
    """Closed while all is well. Opened by the first failure: a Redis that is not asked costs a few hits, one that hangs costs time.

    Open at first, as nothing is connected yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._probe_at_s = 0.0
        self._next_pause_s = _FIRST_PAUSE_S
        self.is_closed = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is due; 0 where it is due now."""
        return max(0.0, self._probe_at_s - self._clock())

    def close(self) -> None:
        """After a probe that went well."""
        self.is_closed = True
        self._next_pause_s = _FIRST_PAUSE_S

    def open(self) -> None:
        """After a failure. Those of what was under way at the time do not count again."""
        if not self.is_closed and self.pause_s:
            return
        self.is_closed = False
        self._probe_at_s = self._clock() + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, _MAX_PAUSE_S)
