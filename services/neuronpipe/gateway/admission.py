"""Admission control: so many requests and so many tokens at once, for every request, alone, in a batch or on a stream."""

import time
from collections.abc import Callable, Collection
from typing import Self

from neuronpipe.core.errors import Overloaded
from neuronpipe.gateway.load_shedding import DrainRate, LoadShedding

# Bulk requests leave this share of the gate to interactive ones, so that it is seldom necessary to end one that is under way.
_INTERACTIVE_SHARE = 0.25
# Bounds of the time that a refused caller is told to wait, in seconds. There is seldom room sooner; a later time cannot
# be forecast.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 10.0
# For so long refusals before reading are the same one, as to refuse must cost little.
_REFUSAL_LIFE_S = 0.02
# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


class Admission:
    """A request inside the gate, until the block ends whose context manager it is."""

    __slots__ = ("_gate", "_is_estimate", "began_s", "input_bytes", "is_shed", "shed", "tokens")

    def __init__(self, gate: "Gate", input_bytes: int, tokens: int, shed: Callable[[], None], *, is_estimate: bool) -> None:
        self._gate = gate
        self.input_bytes = input_bytes
        self.tokens = tokens
        self.shed = shed
        self.is_shed = False
        self.began_s = time.monotonic()
        self._is_estimate = is_estimate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.is_shed:
            self._gate.leave(self, is_answered=kind is None)

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
        self._drained = DrainRate()
        self._tokens_per_byte = _TOKENS_PER_BYTE
        self.shedding = LoadShedding(self._drained)
        self._last_refusal: tuple[float, Overloaded | None] = 0.0, None

    @property
    def in_flight(self) -> tuple[int, int]:
        """Requests and tokens inside."""
        return self._requests, self._tokens

    def check_room(self, remaining_s: float | None) -> None:
        """Load shedding before a request is read. Raises Overloaded where there is no place, or none that is free by its deadline, and
        DeadlineExceeded where even then no answer would be ready.

        `remaining_s`: what is left of the request's deadline; None for none.
        """
        is_full = self._requests >= self._limits[0] and not self._bulk
        excess_requests = 1 if is_full else self.shedding.excess_requests(self._requests, remaining_s)
        if excess_requests:
            made_s, error = self._last_refusal
            if error is None or time.monotonic() >= made_s + _REFUSAL_LIFE_S:
                error = self.overloaded((excess_requests, 0))
                self._last_refusal = time.monotonic(), error
            raise error

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

    def leave(self, admission: Admission, *, is_answered: bool) -> None:
        """The end of a request that was not shed."""
        self._take_out(admission)
        if is_answered:
            self.shedding.note_answer(time.monotonic() - admission.began_s)
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
        """The error of a request that is refused or shed, with the time that the excess takes to drain."""
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
