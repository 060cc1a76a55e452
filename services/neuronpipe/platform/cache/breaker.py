"""A circuit breaker (M. Nygard, Release It!): after a failure, Redis is not used until one probe has succeeded."""

import math
import time
from collections.abc import Callable

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
# After being closed for this long, the next pause starts at the shortest again. Until then pauses keep growing: small
# probes may succeed where real look-ups fail.
_WELL_AFTER_S = 10.0


class Breaker:
    """Closed while Redis works; the first failure opens it.

    Skipping Redis costs a few cache hits. Waiting for a Redis that hangs costs latency. The breaker is open at first,
    because nothing is connected yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._probe_at_s = 0.0
        self._next_pause_s = _FIRST_PAUSE_S
        self._closed_at_s = -math.inf
        self.is_closed = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is due; 0 if it is due now."""
        return max(0.0, self._probe_at_s - self._clock())

    def close(self) -> None:
        """Call after a successful probe."""
        self.is_closed = True
        self._closed_at_s = self._clock()

    def open(self) -> bool:
        """Call after a failure. Failures of calls that were in flight at that time do not count again.

        Returns whether it had been closed for long.
        """
        if not self.is_closed and self.pause_s:
            return False
        was_well = self.is_closed and self._clock() - self._closed_at_s >= _WELL_AFTER_S
        if was_well:
            self._next_pause_s = _FIRST_PAUSE_S
        self.is_closed = False
        self._probe_at_s = self._clock() + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, _MAX_PAUSE_S)
        return was_well
