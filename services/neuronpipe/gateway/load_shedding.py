"""What the gateway tells an overload by, so that it can refuse a request before it reads it."""

import math
import time

from neuronpipe.core.errors import DeadlineExceeded

# The time over which the drain rate is an average, in seconds.
_RATE_WINDOW_S = 2.0
# An overload is over when for so long no request was late or refused.
_OVERLOAD_S = 1.0
# Fewer requests inside say nothing of a load.
_MIN_REQUESTS = 16
# The weight of the newest answer in what answers take.
_ANSWER_WEIGHT = 0.05
# A request with less than this share of the usual time left has spent most of it in the network, or in gRPC.
_LEAST_SHARE_LEFT = 0.5


class DrainRate:
    """How many requests and tokens drain in a second, older ones fading."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0.0
        self._at_s = time.monotonic()

    def add(self, requests: int, tokens: int) -> None:
        """So much has left the gate."""
        self._fade()
        self._requests += requests
        self._tokens += tokens

    def seconds(self, requests: int, tokens: int) -> float:
        """How long so much takes to drain; infinite while nothing does."""
        self._fade()
        return max(_seconds(requests, self._requests), _seconds(tokens, self._tokens))

    def _fade(self) -> None:
        now_s = time.monotonic()
        kept = math.exp((self._at_s - now_s) / _RATE_WINDOW_S)
        self._requests *= kept
        self._tokens *= kept
        self._at_s = now_s


class LoadShedding:
    """Refuses requests that would be late. Does nothing before one was late."""

    def __init__(self, drained: DrainRate) -> None:
        self._drained = drained
        self._overloaded_until_s = 0.0
        self._answer_s = 0.0

    def note_late(self) -> None:
        """A request inside has passed its deadline, or is sure to."""
        self._overloaded_until_s = time.monotonic() + _OVERLOAD_S

    def note_answer(self, seconds: float) -> None:
        """A request was answered so long after it was let in."""
        self._answer_s += _ANSWER_WEIGHT * (seconds - self._answer_s)

    def excess_requests(self, inside: int, remaining_s: float | None) -> int:
        """How many of the requests inside must leave before one more can be answered in time; 0 where it may come in.

        `remaining_s`: what is left of its deadline; None for none. Raises DeadlineExceeded where an answer would take longer in any case.
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
