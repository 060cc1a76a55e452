"""The load of the gate and of each model: what is in flight, how fast it drains, and which requests would be late.

One tenant's late requests and long answers say nothing of another's: what answers usually take is learned for each
tenant of each model, and a forecast counts only the requests that go before the tenant's next one.
"""

import math
import time
from typing import Generic, TypeVar

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
# If less than this share of its usual time is left, a request has spent most of it in the network or in gRPC. Not all
# of it: under overload, answers usually take as long as their deadlines let them.
_LEAST_SHARE_LEFT = 0.5
# A model keeps what it knows of so many tenants that have nothing in flight.
_MAX_IDLE_TENANTS = 500

# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05

AdmittedT = TypeVar("AdmittedT")


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


class Load:
    """Requests and tokens in flight, and the rate at which they drain while there are any."""

    __slots__ = ("_at_s", "_drained_requests", "_drained_tokens", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._drained_requests = self._drained_tokens = 0.0
        self._at_s = time.monotonic()

    def enter(self, tokens: int) -> None:
        """A request of so many tokens comes. The time in which there was none says nothing of the rate."""
        if not self.requests:
            self._at_s = time.monotonic()
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int, *, is_drained: bool = True) -> None:
        """A request leaves; `is_drained`: because it has run."""
        if is_drained:
            self._fade()
            self._drained_requests += 1
            self._drained_tokens += tokens
        self.requests -= 1
        self.tokens -= tokens

    def seconds(self, requests: float, tokens: float) -> float:
        """The time in which this many requests and tokens drain; infinite while nothing drains."""
        self._fade()
        return max(_seconds(requests, self._drained_requests), _seconds(tokens, self._drained_tokens))

    def retry_after_s(self, requests: int, tokens: int) -> float:
        """What a refused caller is told to wait, until this many requests and tokens have drained."""
        return min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, self.seconds(requests, tokens)))

    def _fade(self) -> None:
        now_s = time.monotonic()
        if self.requests:
            kept = math.exp((self._at_s - now_s) / _RATE_WINDOW_S)
            self._drained_requests *= kept
            self._drained_tokens *= kept
        self._at_s = now_s


class TenantLoad(Generic[AdmittedT]):
    """What one tenant has of a model. `admitted`: in the order in which they came. `answer_s`: how long its answers
    usually take; 0 before the first.
    """

    __slots__ = ("admitted", "answer_s", "estimate", "late_until_s", "weight")

    def __init__(self) -> None:
        self.admitted: dict[AdmittedT, None] = {}
        self.estimate = TokenEstimate()
        self.weight = 1.0
        self.answer_s = 0.0
        self.late_until_s = -math.inf

    def share(self, more_requests: int = 0) -> float:
        """Its requests by its weight."""
        return (len(self.admitted) + more_requests) / self.weight


class ModelLoad(Generic[AdmittedT]):
    """The load of one model. It refuses nothing before the first late request. `limit`: of requests; 0 for none."""

    def __init__(self, name: str, limit: int = 0) -> None:
        self.name = name
        self.limit = limit
        self.load = Load()
        self.overloaded_until_s = -math.inf
        self._tenants: dict[str, TenantLoad[AdmittedT]] = {}
        self._weights = 0.0  # of the tenants that have something in flight
        self._answer_s = 0.0

    def known(self, tenant: str) -> TenantLoad[AdmittedT] | None:
        """What a tenant has of it; None for one that has not called it of late."""
        return self._tenants.get(tenant)

    def of(self, tenant: str) -> TenantLoad[AdmittedT]:
        """What a tenant has of it, at once with a request of it."""
        return self._tenants.get(tenant) or self._new(tenant)

    def enter(self, one: TenantLoad[AdmittedT], weight: float, admitted: AdmittedT, tokens: int) -> None:
        """A request of a tenant is let in."""
        if not one.admitted:
            one.weight = weight
            self._weights += weight
        one.admitted[admitted] = None
        self.load.enter(tokens)

    def leave(self, one: TenantLoad[AdmittedT], admitted: AdmittedT, tokens: int, *, is_drained: bool) -> None:
        """A request leaves. `is_drained`: it was not shed."""
        del one.admitted[admitted]
        if not one.admitted:
            self._weights -= one.weight
        self.load.leave(tokens, is_drained=is_drained)

    def note_answer(self, one: TenantLoad[AdmittedT], seconds: float) -> None:
        """Records how long a request took to answer after its admission."""
        one.answer_s += _ANSWER_WEIGHT * (seconds - one.answer_s)
        self._answer_s += _ANSWER_WEIGHT * (seconds - self._answer_s)

    def note_late(self, one: TenantLoad[AdmittedT], remaining_s: float | None) -> None:
        """Records that a request in flight has passed its deadline, or will. `remaining_s`: what was left of it when
        the request came, without the time in which it was held: one that was hopeless says nothing.
        """
        if remaining_s is None or remaining_s >= _LEAST_SHARE_LEFT * (one.answer_s or self._answer_s):
            one.late_until_s = self.overloaded_until_s = time.monotonic() + _OVERLOAD_S

    def excess_requests(self, one: TenantLoad[AdmittedT], weight: float, remaining_s: float | None) -> float:
        """The number of requests in flight that must leave before one more of a tenant can be answered in time; 0 if
        it fits, infinite if a response would take longer in any case.

        `remaining_s`: the time until its deadline; None for none.
        """
        now_s = time.monotonic()
        if remaining_s is None or now_s >= self.overloaded_until_s:
            return 0
        if now_s < one.late_until_s and remaining_s < _LEAST_SHARE_LEFT * one.answer_s:
            return math.inf
        ahead = self._ahead(one, weight)
        wait_s = self.load.seconds(ahead, 0) if ahead >= _MIN_REQUESTS else 0.0
        if wait_s <= remaining_s:
            return 0
        self.overloaded_until_s = now_s + _OVERLOAD_S
        return math.ceil(ahead) - int(ahead * remaining_s / wait_s)

    def furthest_over(self, one: TenantLoad[AdmittedT], weight: float) -> AdmittedT | None:
        """The newest request of the tenant that has most of the model for its weight, where the one that asks would
        still have less with one more; None else.
        """
        most = max((one for one in self._tenants.values() if one.admitted), key=TenantLoad.share, default=None)
        asks = (len(one.admitted) + 1) / weight
        return next(reversed(most.admitted)) if most and most.share(-1) >= asks else None

    def _ahead(self, one: TenantLoad[AdmittedT], weight: float) -> float:
        """How many requests run before the next one of a tenant: all, or fewer where tenants take turns."""
        own = len(one.admitted)
        weights = self._weights if own else self._weights + weight
        return min(self.load.requests, (own + 1) * weights / weight)

    def _new(self, tenant: str) -> TenantLoad[AdmittedT]:
        if len(self._tenants) >= 2 * _MAX_IDLE_TENANTS:
            idle = [name for name, one in self._tenants.items() if not one.admitted]
            for name in idle[: len(idle) - _MAX_IDLE_TENANTS]:
                del self._tenants[name]
        return self._tenants.setdefault(tenant, TenantLoad())


def _seconds(amount: float, drained: float) -> float:
    return amount * _RATE_WINDOW_S / drained if drained > 1e-9 else math.inf if amount else 0.0
