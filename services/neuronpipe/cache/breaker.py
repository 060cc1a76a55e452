"""A circuit breaker (M. Nygard, Release It!): what failed is left alone for a while, and tried by one probe before it is used again."""

import math
import time
from collections.abc import Callable

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
# Closed for so long, it is well again. Until then pauses go on growing: small probes may succeed where real questions fail.
_WELL_AFTER_S = 10.0


class Breaker:
    """Closed while all is well. Opened by the first failure: a Redis that is not asked costs a few hits, one that hangs costs time.

    Open at first, as nothing is connected yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._probe_at_s = 0.0
        self._next_pause_s = _FIRST_PAUSE_S
        self._closed_at_s = -math.inf
        self.is_closed = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is due; 0 where it is due now."""
        return max(0.0, self._probe_at_s - self._clock())

    def close(self) -> None:
        """After a probe that went well."""
        self.is_closed = True
        self._closed_at_s = self._clock()

    def open(self) -> bool:
        """After a failure; those of what was under way at the time do not count again. Returns whether all was well before."""
        if not self.is_closed and self.pause_s:
            return False
        was_well = self.is_closed and self._clock() - self._closed_at_s >= _WELL_AFTER_S
        if was_well:
            self._next_pause_s = _FIRST_PAUSE_S
        self.is_closed = False
        self._probe_at_s = self._clock() + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, _MAX_PAUSE_S)
        return was_well
