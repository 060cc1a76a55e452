"""The gate that every request passes, alone, in a batch or on a stream: so many requests and so many tokens at once, and no more."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from neuronpipe.core.errors import Overloaded

# Bulk requests leave this share of the gate to interactive ones, so that it is seldom necessary to end one that is under way.
_INTERACTIVE_SHARE = 0.25
# What a refused caller is told to wait, in seconds: a place is seldom free sooner, and who knows of later.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 10.0
# The time over which the drain rate is an average, in seconds.
_RATE_WINDOW_S = 2.0
# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


class Place:
    """A request inside the gate."""

    __slots__ = ("_gate", "_is_estimate", "input_bytes", "is_shed", "shed", "tokens")

    def __init__(self, gate: "Gate", input_bytes: int, tokens: int, shed: Callable[[], None], *, is_estimate: bool) -> None:
        self._gate = gate
        self.input_bytes = input_bytes
        self.tokens = tokens
        self.shed = shed
        self.is_shed = False
        self._is_estimate = is_estimate

    def count(self, tokens: int) -> None:
        """Corrects the estimate, if it was one, once the request's tokens are known."""
        if self._is_estimate:
            self._gate.correct(self, tokens)


class Gate:
    """Counts requests and tokens in and out."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._limits = (max_requests, max_tokens)
        self._requests = 0
        self._tokens = 0
        self._bulk: dict[Place, None] = {}  # in the order in which they came
        self._drained = (_Rate(), _Rate())
        self._tokens_per_byte = _TOKENS_PER_BYTE

    @property
    def in_flight(self) -> tuple[int, int]:
        """Requests and tokens inside."""
        return self._requests, self._tokens

    @contextmanager
    def admit(self, input_bytes: int, known_tokens: int | None = None, *, is_bulk: bool, shed: Callable[[], None]) -> Iterator[Place]:
        """A place in the gate for a request of so many bytes. Raises Overloaded where it is full.

        `known_tokens`: what it counts as from first to last; else that is estimated until it is counted.

        The newest bulk requests are shed to make room for an interactive one: `shed` is called, and the place's `is_shed` set.
        """
        tokens = max(1, round(input_bytes * self._tokens_per_byte)) if known_tokens is None else known_tokens
        place = Place(self, input_bytes, tokens, shed, is_estimate=known_tokens is None)
        excess = self._excess(place.tokens, is_bulk=is_bulk)
        if excess and not is_bulk and not self._excess(place.tokens, is_bulk=False, besides=self._bulk):
            while excess:
                self._shed(next(reversed(self._bulk)))
                excess = self._excess(place.tokens, is_bulk=False)
        if excess:
            raise self.overloaded(excess)
        self._requests += 1
        self._tokens += place.tokens
        if is_bulk:
            self._bulk[place] = None
        try:
            yield place
        finally:
            if not place.is_shed:
                self._leave(place)
                for drained, amount in zip(self._drained, (1, place.tokens), strict=True):
                    drained.add(amount)

    def correct(self, place: Place, tokens: int) -> None:
        """Puts a request's real number of tokens in the place of the estimate."""
        # A long context in many overlapping windows says nothing about others.
        tokens_per_byte = min(_MAX_TOKENS_PER_BYTE, tokens / max(1, place.input_bytes))
        self._tokens_per_byte += _ESTIMATE_WEIGHT * (tokens_per_byte - self._tokens_per_byte)
        if not place.is_shed:
            self._tokens += tokens - place.tokens
        place.tokens = tokens

    def overloaded(self, excess: tuple[int, int] = (1, 1)) -> Overloaded:
        """The error of a request that comes, or stays, in vain: wait until what is too much has drained."""
        wait_s = max(drained.seconds(amount) for drained, amount in zip(self._drained, excess, strict=True))
        return Overloaded(
            f"{self._requests} requests with about {self._tokens} tokens in flight, the limits are {self._limits[0]} and {self._limits[1]}",
            min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s)),
        )

    def _excess(self, tokens: int, *, is_bulk: bool, besides: Collection[Place] = ()) -> tuple[int, int] | None:
        """How many requests and tokens would be too much with one more request of so many tokens; None where it fits.

        `besides`: requests inside that are not counted. A request larger than the gate is let into an empty one, or it never could be.
        """
        requests = self._requests - len(besides)
        if not requests:
            return None
        other_tokens = self._tokens - sum(place.tokens for place in besides)
        share = 1 - _INTERACTIVE_SHARE if is_bulk else 1
        excess = requests + 1 - int(self._limits[0] * share), other_tokens + tokens - int(self._limits[1] * share)
        return (max(0, excess[0]), max(0, excess[1])) if max(excess) > 0 else None

    def _shed(self, place: Place) -> None:
        self._leave(place)
        place.is_shed = True
        place.shed()

    def _leave(self, place: Place) -> None:
        self._bulk.pop(place, None)
        self._requests -= 1
        self._tokens -= place.tokens


class _Rate:
    """How much drains in a second, older amounts fading."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._at_s = time.monotonic()

    def add(self, amount: float) -> None:
        self._fade()
        self._amount += amount

    def seconds(self, amount: float) -> float:
        """How long so much takes to drain; infinite while nothing does."""
        self._fade()
        return amount * _RATE_WINDOW_S / self._amount if self._amount > 1e-9 else math.inf if amount else 0.0

    def _fade(self) -> None:
        now_s = time.monotonic()
        self._amount *= math.exp((self._at_s - now_s) / _RATE_WINDOW_S)
        self._at_s = now_s
