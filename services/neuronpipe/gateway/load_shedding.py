"""Detects overload, so that the gateway can refuse a request before it reads it."""

import math
import time

from neuronpipe.core.errors import DeadlineExceeded

# Bounds of the time that a refused caller is told to wait, in seconds. There is seldom room sooner; a later time cannot
# be forecast.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 10.0
# The time over which the drain rate is an average, in seconds.
_RATE_WINDOW_S = 2.0
# An overload ends when no request was late or refused for this time.
_OVERLOAD_S = 1.0
# With fewer requests in flight, there is no overload.
_MIN_REQUESTS = 16
# The weight of the newest response in the estimate of response times.
_ANSWER_WEIGHT = 0.05
# If less than this share of its usual time is left, a request has spent most of it in the network or in gRPC.
_LEAST_SHARE_LEFT = 0.5


class DrainRate:
    """The rate at which requests and tokens drain, with older ones decaying."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0.0
        self._at_s = time.monotonic()

    def add(self, requests: int, tokens: int) -> None:
        """Adds requests and tokens that have left."""
        self._fade()
        self._requests += requests
        self._tokens += tokens

    def seconds(self, requests: int, tokens: int) -> float:
        """The time in which this many requests and tokens drain; infinite while nothing drains."""
        self._fade()
        return max(_seconds(requests, self._requests), _seconds(tokens, self._tokens))

    def retry_after_s(self, requests: int, tokens: int) -> float:
        """What a refused caller is told to wait, until this many requests and tokens have drained."""
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, self.seconds(requests, tokens)))

    def _fade(self) -> None:
        now_s = time.monotonic()
        kept = math.exp((self._at_s - now_s) / _RATE_WINDOW_S)
        self._requests *= kept
        self._tokens *= kept
        self._at_s = now_s


class LoadShedding:
    """Refuses requests that would be late. It does nothing before the first late request."""

    def __init__(self, drained: DrainRate) -> None:
        self._drained = drained
        self._overloaded_until_s = 0.0
        self._answer_s = 0.0

    @property
    def is_active(self) -> bool:
        """Whether a request was late or refused of late."""
        return time.monotonic() < self._overloaded_until_s

    def note_late(self) -> None:
        """Records that a request in flight has passed its deadline, or will."""
        self._overloaded_until_s = time.monotonic() + _OVERLOAD_S

    def note_answer(self, seconds: float) -> None:
        """Records how long a request took to answer after its admission."""
        self._answer_s += _ANSWER_WEIGHT * (seconds - self._answer_s)

    def excess_requests(self, inside: int, remaining_s: float | None) -> int:
        """The number of requests in flight that must leave before one more can be answered in time; 0 if it fits.

        `remaining_s`: the time until its deadline; None for none. Raises DeadlineExceeded if a response would take
        longer in any case.
        """
        now_s = time.monotonic()
        if remaining_s is None or now_s >= self._overloaded_until_s:
            return 0
        if remaining_s < _LEAST_SHARE_LEFT * self._answer_s:
            raise DeadlineExceeded("the deadline would pass before the result is ready")
        wait_s = self._drained.seconds(inside, 0) if inside >= _MIN_REQUESTS else 0.0
        if wait_s <= remaining_s:
            return 0
        self._overloaded_until_s = now_s + _OVERLOAD_S
        return inside - int(inside * remaining_s / wait_s)


def _seconds(amount: int, drained: float) -> float:
    return amount * _RATE_WINDOW_S / drained if drained > 1e-9 else math.inf if amount else 0.0
