"""Admission control: so many requests and so many tokens at once, for every request, alone, in a batch or on a stream."""

import math
import time
from collections.abc import Callable, Collection
from typing import Self

from neuronpipe.core.errors import Overloaded

# Bulk requests leave this share of the gate to interactive ones, so that it is seldom necessary to end one that is under way.
_INTERACTIVE_SHARE = 0.25
# The least and the most that a refused caller is told to wait, in seconds. There is seldom room sooner; later nobody can foresee.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 10.0
# The time over which the drain rate is an average, in seconds.
_RATE_WINDOW_S = 2.0
# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


class Admission:
    """A request inside the gate, until the block ends whose context manager it is."""

    __slots__ = ("_gate", "_is_estimate", "input_bytes", "is_shed", "shed", "tokens")

    def __init__(self, gate: "Gate", input_bytes: int, tokens: int, shed: Callable[[], None], *, is_estimate: bool) -> None:
        self._gate = gate
        self.input_bytes = input_bytes
        self.tokens = tokens
        self.shed = shed
        self.is_shed = False
        self._is_estimate = is_estimate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_shed:
            self._gate.leave(self)

    def count(self, tokens: int) -> None:
        """Corrects the estimate, if it was one, once the request's tokens are known. Raises Overloaded where it let in too much."""
        if self._is_estimate:
            self._gate.correct(self, tokens)


class Gate:
    """Counts requests and tokens in and out."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._limits = (max_requests, max_tokens)
        self._requests = 0
        self._tokens = 0
        self._bulk: dict[Admission, None] = {}  # in the order in which they came
        self._drained = _DrainRate()
        self._tokens_per_byte = _TOKENS_PER_BYTE

    @property
    def in_flight(self) -> tuple[int, int]:
        """Requests and tokens inside."""
        return self._requests, self._tokens

    def admit(self, input_bytes: int, known_tokens: int | None = None, *, is_bulk: bool, shed: Callable[[], None]) -> Admission:
        """Admits a request of so many bytes for as long as the block runs. Raises Overloaded where there is no room.

        `known_tokens`: what the request costs, where that is known before it is tokenized; else it is estimated from the bytes.
        `shed`: called where a bulk request must end, to make room for an interactive one. The newest go first; `is_shed` is set then.
        """
        tokens = max(1, round(input_bytes * self._tokens_per_byte)) if known_tokens is None else known_tokens
        admission = Admission(self, input_bytes, tokens, shed, is_estimate=known_tokens is None)
        self._make_room(1, tokens, is_bulk=is_bulk)
        self._requests += 1
        self._tokens += tokens
        if is_bulk:
            self._bulk[admission] = None
        return admission

    def leave(self, admission: Admission) -> None:
        """The end of a request that was not shed."""
        self._take_out(admission)
        self._drained.add(1, admission.tokens)

    def correct(self, admission: Admission, tokens: int) -> None:
        """Puts a request's real number of tokens in the place of the estimate. Raises Overloaded where there is no room for the rest."""
        # A long context in many overlapping windows says nothing about others.
        tokens_per_byte = min(_MAX_TOKENS_PER_BYTE, tokens / max(1, admission.input_bytes))
        self._tokens_per_byte += _ESTIMATE_WEIGHT * (tokens_per_byte - self._tokens_per_byte)
        if not admission.is_shed:
            if tokens > admission.tokens:
                self._make_room(0, tokens - admission.tokens, is_bulk=admission in self._bulk)
            self._tokens += tokens - admission.tokens
        admission.tokens = tokens

    def overloaded(self, excess: tuple[int, int] = (1, 1)) -> Overloaded:
        """The error of a request that comes, or stays, in vain: wait until what is too much has drained."""
        wait_s = self._drained.seconds(*excess)
        return Overloaded(
            f"{self._requests} requests with about {self._tokens} tokens in flight, the limits are {self._limits[0]} and {self._limits[1]}",
            min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s)),
        )

    def _make_room(self, requests: int, tokens: int, *, is_bulk: bool) -> None:
        """Sheds bulk requests as far as so many requests and tokens more need their room. Raises Overloaded where there is none."""
        excess = self._excess(requests, tokens, is_bulk=is_bulk)
        if excess and not is_bulk and not self._excess(requests, tokens, is_bulk=False, besides=self._bulk):
            while excess:
                self._shed(next(reversed(self._bulk)))
                excess = self._excess(requests, tokens, is_bulk=False)
        if excess:
            raise self.overloaded(excess)

    def _excess(
        self, more_requests: int, more_tokens: int, *, is_bulk: bool, besides: Collection[Admission] = ()
    ) -> tuple[int, int] | None:
        """How many requests and tokens would be too much with so many more; None where they fit.

        `besides`: requests inside that are not counted. A request larger than the gate is let into an empty one, or it never could be.
        """
        requests, tokens = self._requests + more_requests, self._tokens + more_tokens
        if besides:
            requests -= len(besides)
            tokens -= sum(admission.tokens for admission in besides)
        if requests <= 1:
            return None
        share = 1 - _INTERACTIVE_SHARE if is_bulk else 1
        # One that is inside already has its place, and only its tokens are in question.
        excess = requests - int(self._limits[0] * share) if more_requests else 0, tokens - int(self._limits[1] * share)
        return (max(0, excess[0]), max(0, excess[1])) if max(excess) > 0 else None

    def _shed(self, admission: Admission) -> None:
        self._take_out(admission)
        admission.is_shed = True
        admission.shed()

    def _take_out(self, admission: Admission) -> None:
        self._bulk.pop(admission, None)
        self._requests -= 1
        self._tokens -= admission.tokens


class _DrainRate:
    """How many requests and tokens drain in a second, older ones fading."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0.0
        self._at_s = time.monotonic()

    def add(self, requests: int, tokens: int) -> None:
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


def _seconds(amount: int, drained: float) -> float:
    return amount * _RATE_WINDOW_S / drained if drained > 1e-9 else math.inf if amount else 0.0
