"""Admission control: so many requests and tokens at once, whether alone, in a batch or on a stream."""

import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.items import ModelKey
from neuronpipe.gateway.load_shedding import DrainRate, LoadShedding
from neuronpipe.gateway.tenants.tenants import Admitted, Tenants

# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


class TokenEstimate:
    """Tokens of inputs by their bytes, as those before them had."""

    def __init__(self) -> None:
        self._tokens_per_byte = _TOKENS_PER_BYTE

    def of(self, input_bytes: int) -> int:
        """The tokens of an input of so many bytes; at least one."""
        return max(1, round(input_bytes * self._tokens_per_byte))

    def learn(self, input_bytes: int, tokens: int) -> None:
        """An input of so many bytes had so many tokens."""
        # A long context in many overlapping windows says nothing about others.
        tokens_per_byte = min(_MAX_TOKENS_PER_BYTE, tokens / max(1, input_bytes))
        self._tokens_per_byte += _ESTIMATE_WEIGHT * (tokens_per_byte - self._tokens_per_byte)


# Bulk requests leave this share of the gate to interactive ones, so that it is seldom necessary to end one that is
# under way.
_INTERACTIVE_SHARE = 0.25
# For so long refusals before reading are the same one, as to refuse must cost little.
_REFUSAL_LIFE_S = 0.02


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(Admitted):
    """A request inside the gate, until the block ends whose context manager it is. `held_s`: how much of that time it
    was held, which says nothing of how long answers take.
    """

    gate: "Gate"
    input_bytes: int
    is_estimate: bool
    began_s: float
    held_s: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.is_shed:
            self.gate.leave(self, is_answered=kind is None)

    def turn(self, model: ModelKey) -> AbstractAsyncContextManager[Call]:
        """Waits for its tenant's turn, and runs in the block with the call that it yields; at once where there are no
        tenants.
        """
        return self.gate.tenants.turn(self, model) if self.gate.tenants else nullcontext(self.call)

    def grow(self, tokens: int) -> None:
        """Counts so many more tokens, which it will generate. Raises Overloaded where there is no room for them."""
        self.gate.grow(self, tokens)

    def count(self, tokens: int) -> None:
        """Corrects the estimate, if it was one. Raises Overloaded where it let in too much."""
        if self.is_estimate:
            self.gate.correct(self, tokens)


class Gate:
    """Counts requests and tokens in and out. `tenants`: their quotas and shares; None where callers are anonymous."""

    def __init__(self, max_requests: int, max_tokens: int, tenants: Tenants | None = None) -> None:
        self._limits = (max_requests, max_tokens)
        self.tenants = tenants
        self._requests = 0
        self._tokens = 0
        # When the last request came, or left, on time.monotonic().
        self.last_s = -math.inf
        self._bulk: dict[Admitted, None] = {}  # in the order in which they came
        self._drained = DrainRate()
        self._estimate = TokenEstimate()
        self.shedding = LoadShedding(self._drained)
        self._last_refusal: tuple[float, Overloaded | None] = 0.0, None

    @property
    def in_flight(self) -> tuple[int, int]:
        """Requests and tokens inside."""
        return self._requests, self._tokens

    @property
    def share(self) -> float:
        """What is inside to the limits, of requests or of tokens, whichever is more."""
        return max(self._requests / self._limits[0], self._tokens / self._limits[1])

    def check_room(self, remaining_s: float | None, tenant: str = "") -> None:
        """Load shedding before a request is read. Raises Overloaded where there is no place, or none that is free by
        its deadline, and DeadlineExceeded where even then no answer would be ready.

        `remaining_s`: what is left of the request's deadline; None for none.
        """
        is_full = self._requests >= self._limits[0] and not self._bulk
        if self.tenants:
            self.tenants.check(tenant)
            if (is_full or self.shedding.is_active) and self.tenants.furthest_over(tenant):
                return  # the load is another's, who makes room
        excess_requests = 1 if is_full else self.shedding.excess_requests(self._requests, remaining_s)
        if excess_requests:
            made_s, error = self._last_refusal
            if error is None or time.monotonic() >= made_s + _REFUSAL_LIFE_S:
                error = self.overloaded((excess_requests, 0))
                self._last_refusal = time.monotonic(), error
            raise error.with_traceback(None)  # each raise would add its frames, with what the request has sent

    def admit(
        self, call: Call, input_bytes: int, known_tokens: int | None = None, *, shed: Callable[[], None]
    ) -> Admission:
        """Admits a request of so many bytes for as long as the block runs. Raises Overloaded where there is no room.

        `known_tokens`: what the request costs, where that is known before it is tokenized; else it is estimated from
        the bytes. `shed`: called where it must end, to make room: a bulk request for an interactive one, or one of a
        tenant that has more of the gate than its share. The newest go first; `is_shed` is set then.
        """
        tokens = self._estimate.of(input_bytes) if known_tokens is None else known_tokens
        admission = Admission(
            gate=self,
            call=call,
            input_bytes=input_bytes,
            tokens=tokens,
            is_estimate=known_tokens is None,
            shed=shed,
            began_s=time.monotonic(),
        )
        if self.tenants:
            self.tenants.check(call.caller.tenant, tokens)
        self._make_room(admission, 1, tokens)
        self._requests += 1
        self._tokens += tokens
        self.last_s = admission.began_s
        if call.is_bulk:
            self._bulk[admission] = None
        if self.tenants:
            self.tenants.enter(admission)
        return admission

    def leave(self, admission: Admission, *, is_answered: bool) -> None:
        """The end of a request that was not shed."""
        self._take_out(admission)
        if is_answered:
            self.shedding.note_answer(time.monotonic() - admission.began_s - admission.held_s)
            # One that a stage refuses leaves at once, and says nothing of how fast others do.
            self._drained.add(1, admission.tokens)

    def correct(self, admission: Admission, tokens: int) -> None:
        """Replaces the estimate by a request's real tokens. Raises Overloaded where there is no room for the rest."""
        self._estimate.learn(admission.input_bytes, tokens)
        self.grow(admission, tokens - admission.tokens)

    def grow(self, admission: Admission, tokens: int) -> None:
        """Counts so many more tokens of a request, or less. Raises Overloaded where there is no room for them."""
        if not admission.is_shed:
            if tokens > 0:
                self._make_room(admission, 0, tokens)
            self._tokens += tokens
            if self.tenants:
                self.tenants.correct(admission, tokens)
        admission.tokens += tokens

    def overloaded(self, excess: tuple[int, int] = (1, 1)) -> Overloaded:
        """The error of a request that is refused or shed, with the time that the excess takes to drain."""
        return Overloaded(
            f"{self._requests} requests with about {self._tokens} tokens in flight, the limits are {self._limits[0]} "
            f"and {self._limits[1]}",
            self._drained.retry_after_s(*excess),
        )

    def _make_room(self, admission: Admission, requests: int, tokens: int) -> None:
        """Sheds others for so many more requests and tokens of this one. Raises Overloaded where there is no room."""
        is_bulk = admission.call.is_bulk
        excess = self._excess(requests, tokens, is_bulk=is_bulk)
        if excess and not is_bulk and not self._excess(requests, tokens, is_bulk=False, besides=self._bulk):
            while excess:
                self._shed(next(reversed(self._bulk)))
                excess = self._excess(requests, tokens, is_bulk=False)
        while excess and self.tenants and (other := self.tenants.furthest_over(admission.call.caller.tenant, tokens)):
            self._shed(other)
            excess = self._excess(requests, tokens, is_bulk=is_bulk)
        if excess:
            raise self.overloaded(excess)

    def _excess(
        self, more_requests: int, more_tokens: int, *, is_bulk: bool, besides: Collection[Admitted] = ()
    ) -> tuple[int, int] | None:
        """How many requests and tokens would be too much with so many more; None where they fit.

        `besides`: requests inside that are not counted. A request larger than the gate is let into an empty one, or it
        never could be.
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

    def _shed(self, admission: Admitted) -> None:
        self._take_out(admission)
        admission.is_shed = True
        admission.shed()

    def _take_out(self, admission: Admitted) -> None:
        self._bulk.pop(admission, None)
        self._requests -= 1
        self._tokens -= admission.tokens
        if not self._requests:
            self.last_s = time.monotonic()
        if self.tenants:
            self.tenants.leave(admission)
