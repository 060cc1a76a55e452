"""Tokens a minute, by a token bucket."""

import math
import time
from collections.abc import Callable

_MINUTE_S = 60.0


class TokenBucket:
    """Holds the tokens of a minute at most, and gets them back evenly. The level may be negative: a debt, where a
    request took more than was there.

    `capacity`: tokens a minute; may be changed. `share`: the part of it that counts here; less than 1 where several
    gateways have the same budget and do not know of each other. `taken`: since that was last told the others.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.share = 1.0
        self.taken = 0
        self._clock = clock
        self._level = float(capacity)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """What is left now."""
        now_s = self._clock()
        most = self.capacity * self.share
        self._level = min(most, self._level + (now_s - self._at_s) * most / _MINUTE_S)
        self._at_s = now_s
        return self._level

    @level.setter
    def level(self, level: float) -> None:
        self._level, self._at_s = max(-float(self.capacity), level), self._clock()

    def wait_s(self, tokens: int) -> float:
        """How long until there are so many; 0 where they are there. More than a minute's count as a minute's."""
        most = self.capacity * self.share
        missing = min(tokens, most) - self.level
        return math.ceil(missing) * _MINUTE_S / most if missing > 0 else 0.0

    def take(self, tokens: int) -> None:
        """Takes tokens out, also more than there are; puts them back where `tokens` is negative."""
        self.level = self.level - tokens
        self.taken += tokens
