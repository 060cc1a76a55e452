"""The loads that admission control counts for all requests, each model and each tenant of a model: the requests in
flight, how fast they drain, and which would be late.

The fairness of tenants also is in tenants.py (quotas, shares of the gateway), tenant_turns.py (order) and `Places`.
docs/overload.md ("Where a request waits") has the whole.

Late requests and long answers of a tenant say nothing about another tenant: the usual time of answers is learned for
each tenant of each model, and a forecast counts only the requests that go before the tenant's next request.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import retry_delay_s
from neuronpipe.gateway.tenant_turns import Turn

# The longest retry delay of a refused caller. Later is no forecast.
_LONGEST_RETRY_S = 10.0
# The time over which the drain rate is an average, in seconds.
_RATE_WINDOW_S = 2.0
# An overload ends when no request was late or refused for this time.
_OVERLOAD_S = 1.0
# With fewer requests in flight, there is no overload.
_MIN_REQUESTS = 16
# The weight of the newest response in the estimate of response times.
_ANSWER_WEIGHT = 0.05
# If less than this share of its usual time is left, a request has spent most of it in the network or in gRPC. The share
# is not near 1, because under overload usual times grow to the deadlines.
_LEAST_SHARE_LEFT = 0.5
# Maximum number of tenants without requests in flight whose records a model keeps.
_MAX_IDLE_TENANTS = 500

# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


@dataclass(slots=True, eq=False, kw_only=True)
class RequestLoad:
    """The part of the load that is one admitted request.

    - `tenant_load`: the tenant's part of the model's load.
    - `tokens`: the tokens of the input plus `new_tokens`, the maximum number of tokens that the request generates.
    - `shed`: ends the request to make room for the request that `shed_for` then names.
    - `own_turn`: the turn of its tenant in which the request runs.
    """

    call: Call
    model: "ModelLoad"
    tenant_load: "TenantLoad"
    tokens: int
    shed: Callable[[], None]
    new_tokens: int = 0
    generated_tokens: int = 0
    shed_for: str = ""
    own_turn: Turn | None = None

    @property
    def is_shed(self) -> bool:
        """Whether the request had to end."""
        return bool(self.shed_for)

    @property
    def input_tokens(self) -> int:
        return self.tokens - self.new_tokens

    @property
    def cost(self) -> int:
        """The cost of the request so far, in tokens. A request that never ran costs nothing."""
        return self.input_tokens + self.generated_tokens if self.own_turn else 0


class Load:
    """Requests and tokens in flight, and the rate at which they drain while there are any."""

    __slots__ = ("_at_s", "_drained_requests", "_drained_tokens", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._drained_requests = self._drained_tokens = 0.0
        self._at_s = time.monotonic()

    def enter(self, tokens: int) -> None:
        """Counts a request. The time without requests says nothing about the rate."""
        if not self.requests:
            self._at_s = time.monotonic()
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int, *, is_answered: bool = True) -> None:
        """Counts the end of a request.

        `is_answered`: the request was answered: its time says how fast other requests leave. False for a request that
        was shed, or that a stage refused.
        """
        if is_answered:
            self._fade()
            self._drained_requests += 1
            self._drained_tokens += tokens
        self.requests -= 1
        self.tokens -= tokens

    def seconds(self, requests: float, tokens: float) -> float:
        """Returns the time in which this many requests and tokens drain; infinite while nothing drains."""
        self._fade()
        return max(_seconds(requests, self._drained_requests), _seconds(tokens, self._drained_tokens))

    def retry_after_s(self, requests: int, tokens: int) -> float:
        """Returns the time that a refused caller is told to wait, until this many requests and tokens have drained."""
        return retry_delay_s(self.seconds(requests, tokens), _LONGEST_RETRY_S)

    def _fade(self) -> None:
        now_s = time.monotonic()
        if self.requests:
            factor = math.exp((self._at_s - now_s) / _RATE_WINDOW_S)
            self._drained_requests *= factor
            self._drained_tokens *= factor
        self._at_s = now_s


def _seconds(amount: float, drained: float) -> float:
    return amount * _RATE_WINDOW_S / drained if drained > 1e-9 else math.inf if amount else 0.0


class TenantLoad:
    """The requests of one tenant for one model, by arrival. `answer_s`: the usual time of answers; 0 at first."""

    __slots__ = ("_tokens_per_byte", "answer_s", "in_flight", "late_until_s", "weight")

    def __init__(self) -> None:
        self.in_flight: dict[RequestLoad, None] = {}
        self.weight = 1.0
        self.answer_s = 0.0
        self.late_until_s = -math.inf
        self._tokens_per_byte = _TOKENS_PER_BYTE

    def share(self, more_requests: int = 0) -> float:
        """Returns the number of requests relative to the tenant's weight."""
        return (len(self.in_flight) + more_requests) / self.weight

    def estimated_tokens(self, input_bytes: int) -> int:
        """Estimates the tokens of an input from its bytes; at least 1."""
        return max(1, round(input_bytes * self._tokens_per_byte))

    def learn_tokens(self, input_bytes: int, tokens: int) -> None:
        """Corrects the estimate by an input whose tokens are counted."""
        # A long context in many overlapping windows says nothing about other inputs.
        tokens_per_byte = min(_MAX_TOKENS_PER_BYTE, tokens / max(1, input_bytes))
        self._tokens_per_byte += _ESTIMATE_WEIGHT * (tokens_per_byte - self._tokens_per_byte)


class _OfTenant(Protocol):
    """The requests in flight of one tenant, in the order of arrival."""

    in_flight: dict[RequestLoad, None]


OfTenantT = TypeVar("OfTenantT", bound=_OfTenant)


def newest_of_largest(
    tenants: Iterable[OfTenantT], share: Callable[[OfTenantT, int, int], float], own_share: float
) -> RequestLoad | None:
    """Returns the newest request of the tenant with the largest share, if the tenant's share is at least `own_share`
    even without that request; otherwise None.

    `share`: returns a tenant's share with this many requests and tokens more. `own_share`: the share of the tenant that
    needs room, with its next request.
    """
    busy = (tenant for tenant in tenants if tenant.in_flight)
    largest = max(busy, key=lambda tenant: share(tenant, 0, 0), default=None)
    if largest is None:
        return None
    newest = next(reversed(largest.in_flight))
    return newest if share(largest, -1, -newest.tokens) >= own_share else None


class ModelLoad:
    """The load of one model. Before the first late request, it forecasts no lateness.

    `limit`: maximum number of requests in flight, beyond which the admission control refuses requests or makes room; 0:
    no limit.
    """

    def __init__(self, name: str, limit: int = 0) -> None:
        self.name = name
        self.limit = limit
        self.load = Load()
        self.overloaded_until_s = -math.inf
        self._tenants: dict[str, TenantLoad] = {}
        self._weights = 0.0  # the sum for the tenants that have requests in flight
        self._answer_s = 0.0

    def tenant_load(self, tenant: str) -> TenantLoad | None:
        """Returns the load of a tenant; None for a tenant that has not called the model recently."""
        return self._tenants.get(tenant)

    def ensure_tenant_load(self, tenant: str) -> TenantLoad:
        """Returns the load of a tenant that has a request for the model now."""
        return self._tenants.get(tenant) or self._new(tenant)

    def enter(self, request: RequestLoad, weight: float) -> None:
        """Counts a request. `weight`: its tenant's."""
        tenant_load = request.tenant_load
        if not tenant_load.in_flight:
            tenant_load.weight = weight
            self._weights += weight
        tenant_load.in_flight[request] = None
        self.load.enter(request.tokens)

    def leave(self, request: RequestLoad, *, is_answered: bool) -> None:
        """Counts the end of a request; see Load.leave."""
        tenant_load = request.tenant_load
        del tenant_load.in_flight[request]
        if not tenant_load.in_flight:
            self._weights -= tenant_load.weight
        self.load.leave(request.tokens, is_answered=is_answered)

    def note_answer(self, tenant_load: TenantLoad, seconds: float) -> None:
        """Records how long a request took to answer after its admission."""
        tenant_load.answer_s += _ANSWER_WEIGHT * (seconds - tenant_load.answer_s)
        self._answer_s += _ANSWER_WEIGHT * (seconds - self._answer_s)

    def note_late(self, tenant_load: TenantLoad, remaining_s: float | None) -> None:
        """Records that a request in flight missed its deadline, or will miss it. `remaining_s`: the time from the
        arrival of the request to its deadline, without the time for which the request was held. A request that never
        had enough time is not recorded.
        """
        if remaining_s is None or remaining_s >= _LEAST_SHARE_LEFT * (tenant_load.answer_s or self._answer_s):
            tenant_load.late_until_s = self.overloaded_until_s = time.monotonic() + _OVERLOAD_S

    def excess_requests(self, tenant_load: TenantLoad, weight: float, remaining_s: float | None) -> float:
        """Returns the number of requests in flight that must leave before one more request of a tenant can be answered
        in time; 0 if the request fits, infinite if its answer would be late in any case.

        Extends the overload of the model if other requests must leave first, but not if the answer would be late in any
        case. `remaining_s`: the time until the deadline of the request; None for none.
        """
        now_s = time.monotonic()
        if remaining_s is None or now_s >= self.overloaded_until_s:
            return 0
        if now_s < tenant_load.late_until_s and remaining_s < _LEAST_SHARE_LEFT * tenant_load.answer_s:
            return math.inf
        # All requests run before the next request of the tenant, or fewer where tenants take turns.
        tenant_requests = len(tenant_load.in_flight)
        weights = self._weights if tenant_requests else self._weights + weight
        ahead = min(self.load.requests, (tenant_requests + 1) * weights / weight)
        wait_s = self.load.seconds(ahead, 0) if ahead >= _MIN_REQUESTS else 0.0
        if wait_s <= remaining_s:
            return 0
        self.overloaded_until_s = now_s + _OVERLOAD_S
        return math.ceil(ahead) - int(ahead * remaining_s / wait_s)

    def furthest_over(self, tenant_load: TenantLoad, weight: float) -> RequestLoad | None:
        """Returns the newest request of the tenant with the largest share of the model (requests / weight).

        None if that share, without the request, is smaller than the given tenant's share with one more request.
        """
        own_share = (len(tenant_load.in_flight) + 1) / weight
        return newest_of_largest(self._tenants.values(), lambda load, requests, _: load.share(requests), own_share)

    def _new(self, tenant: str) -> TenantLoad:
        if len(self._tenants) >= 2 * _MAX_IDLE_TENANTS:
            idle = [name for name, tenant_load in self._tenants.items() if not tenant_load.in_flight]
            for name in idle[: len(idle) - _MAX_IDLE_TENANTS]:
                del self._tenants[name]
        return self._tenants.setdefault(tenant, TenantLoad())
