"""The tenants of a gateway: their requests in flight, their rights, and their token buckets.

The fairness of tenants also is in loads.py (shares of a model), tenant_turns.py (order) and `Places`.
docs/overload.md ("Where a request waits") has the whole.
"""

import math
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, StrictBool, ValidationError, model_validator

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import Caller, check_tenant_name
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded, SetupError, retry_delay_s
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import Frozen, ModelTable, problems_of
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.loads import Load, RequestLoad, newest_of_largest
from neuronpipe.gateway.tenant_turns import REQUEST_TOKENS, TenantTurns, Turn

_MINUTE_S = 60.0


class TokenBucket:
    """Contains at most the tokens of a minute, and fills evenly. The level may be negative: a debt, where a request
    took more tokens than there were. Debts are kept whole.

    - `capacity`: tokens per minute; may be changed.
    - `share`: the part of the capacity that counts here; less than 1 where several gateways have the same budget and do
      not know of each other.
    - `taken`: the tokens taken since the last exchange.
    - `unanswered`: the number of an exchange without an answer, and its tokens.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.share = 1.0
        self.taken = 0
        self.unanswered: tuple[int, int] | None = None
        self._clock = clock
        self._level = float(capacity)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """The number of tokens that are left now."""
        now_s = self._clock()
        max_level = self.capacity * self.share
        self._level = min(max_level, self._level + (now_s - self._at_s) * max_level / _MINUTE_S)
        self._at_s = now_s
        return self._level

    @level.setter
    def level(self, level: float) -> None:
        self._level, self._at_s = level, self._clock()

    def wait_s(self, tokens: int, taken: int = 0) -> float:
        """Returns the seconds until this many tokens are left; 0 if they are. More tokens than a minute has count as a
        minute's. `taken`: the number of these tokens that were taken already.
        """
        max_level = self.capacity * self.share
        missing = min(tokens, max_level) - (self.level + taken)
        return math.ceil(missing) * _MINUTE_S / max_level if missing > 0 else 0.0

    @property
    def is_full(self) -> bool:
        """Whether all tokens are back, and the other gateways know it."""
        return not self.taken and self.level >= self.capacity * self.share

    def take(self, tokens: int) -> None:
        """Takes tokens, also more than there are; puts tokens back where the number is negative."""
        self.level -= tokens
        self.taken += tokens


# The entry for tenants without an entry.
_OTHERS = "*"
_Quota: TypeAlias = Annotated[int, Field(ge=1, le=10**15, strict=True)]


class Rights(Frozen):
    """The rights of a tenant. None: no limit."""

    models: frozenset[str] | None = None
    weight: float = Field(1.0, gt=0, le=1_000_000, strict=True)
    max_requests_in_flight: _Quota | None = None
    max_tokens_in_flight: _Quota | None = None
    tokens_per_minute: _Quota | None = None
    max_jobs: _Quota | None = None
    acts_for_others: StrictBool = False
    manages_registry: StrictBool = False
    highest_priority: Literal["interactive", "bulk"] = "interactive"
    certificates: frozenset[str] = frozenset()

    @property
    def is_interactive(self) -> bool:
        """Whether requests and jobs of the tenant may go before bulk work."""
        return self.highest_priority == "interactive"


NOTHING = Rights(models=frozenset())
EVERYTHING = Rights()


class TenantBook(Frozen):
    """All tenants."""

    tenants: dict[Annotated[str, AfterValidator(check_tenant_name)], Rights]

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        names = Counter(name for rights in self.tenants.values() for name in rights.certificates)
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise ValueError(f"certificates: several tenants have {', '.join(twice)}; a name is one tenant's")
        return self

    def rights_of(self, tenant: str) -> Rights:
        """Returns the rights of a tenant: no rights if the file does not name it."""
        return self.tenants.get(tenant) or self.tenants.get(_OTHERS) or NOTHING

    def tenant_of(self, name: str) -> str:
        """Returns the tenant to which a name in a certificate belongs; empty for none."""
        return next((tenant for tenant, rights in self.tenants.items() if name in rights.certificates), "")


def parse_tenants(content: bytes) -> TenantBook:
    """Parses the file of tenants. Raises SetupError, which names the place at fault."""
    try:
        return TenantBook.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        raise SetupError(f"--tenants: {problems_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"--tenants: is no TOML in UTF-8: {error}") from error


EntryT = TypeVar("EntryT")

_QUOTAS = "requests_in_flight", "tokens_in_flight", "tokens_per_minute"
# A tenant and its metrics are forgotten after this idle time, or sooner if more than this number of tenants are idle.
_IDLE_S, _MAX_IDLE = 3600.0, 500
# The longest retry delay of a refused caller.
_LONGEST_RETRY_S = 120.0
# Tenants count as several for this time after a request of another tenant than before.
_SEVERAL_S = 2.0


class Tenant:
    """One tenant. `in_flight`: its requests in flight, in the order of arrival. `used_s`: the time of its last request.
    `gateways`: the number of gateways that share its budget, as far as this gateway knows.
    """

    def __init__(self, name: str, meters: Meters) -> None:
        self.name = name
        self.in_flight: dict[RequestLoad, None] = {}
        self.load = Load()
        self.bucket: TokenBucket | None = None
        self.used_s = 0.0
        self.waits = meters.histogram(Metrics.TENANT_WAIT, name)
        meters.gauge(Metrics.TENANT_IN_FLIGHT, lambda: len(self.in_flight), name)
        self.gateways = 1

    @property
    def is_idle(self) -> bool:
        """Whether the tenant could be forgotten: it has nothing in flight, and no debt."""
        return not self.in_flight and (not self.bucket or self.bucket.is_full)

    def forget(self, meters: Meters) -> None:
        """Removes the metrics of the tenant."""
        meters.remove(Metrics.TENANT_WAIT, self.name)
        meters.remove(Metrics.TENANT_IN_FLIGHT, self.name)
        meters.remove(Metrics.TENANT_TOKENS, self.name)
        for quota in _QUOTAS:
            meters.remove(Metrics.TENANT_REFUSED, self.name, quota)


class FairLimit:
    """Limits the things that tenants occupy for long, such as places of calls that wait.

    A tenant may take at most `times` the amount that stays free, so that other tenants find room (dynamic thresholds:
    Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). Without tenants there is only the limit.
    """

    def __init__(self, limit: int, times: int = 1) -> None:
        self.limit = limit
        self.total = 0
        self._times = times
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, tenant: str, amount: int = 1) -> bool:
        """Returns whether a tenant may take this much more."""
        remaining, tenant_amount = self.limit - self.total - amount, self._by_tenant[tenant]
        return remaining >= 0 and (not tenant or not tenant_amount or tenant_amount + amount <= self._times * remaining)

    def take(self, tenant: str, amount: int = 1) -> None:
        """Counts an amount that a tenant occupies from now on."""
        self.total += amount
        self._by_tenant[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Counts an amount that a tenant no longer occupies."""
        self.total -= amount
        self._by_tenant[tenant] -= amount
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Tenants:
    """All tenants of a gateway. `rights_of`: the current rights of a tenant."""

    def __init__(
        self,
        rights_of: Callable[[str], Rights],
        limits: tuple[int, int],
        window_s: float,
        meters: Meters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: maximum numbers of requests and tokens in flight. `window_s`: see TenantTurns."""
        self.rights_of = rights_of
        self._limits = limits
        self._window_s = window_s
        self._meters = meters
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._turns: dict[ModelKey, TenantTurns] = {}
        self._look_from = _MAX_IDLE
        # The tenant that asked last for a turn, and the time when that changed.
        self._last: str | None = None
        self._changed_s = -math.inf

    def table_of(self, caller: Caller, table: ModelTable[EntryT]) -> ModelTable[EntryT]:
        """Returns the models that a caller may use. A caller without a tenant is the gateway itself, which sees all."""
        models = self.models_of(caller)
        return table if models is None else table.only(models)

    def models_of(self, caller: Caller) -> frozenset[str] | None:
        """Returns the names of the models that a caller may use; None: all."""
        return self.rights_of(caller.tenant).models if caller.tenant else None

    def restrict(self, call: Call) -> Call:
        """Lowers the priority of a call to the highest priority of its tenant."""
        if call.is_bulk or self.rights_of(call.caller.tenant).is_interactive:
            return call
        return call._replace(priority=Priority.PRIORITY_BULK)

    def check(self, tenant: str, tokens: int = 1, request: RequestLoad | None = None) -> None:
        """Raises Overloaded where one more request with this many tokens would exceed the tenant's quotas. `request`:
        the request, if it is already in flight and only now its tokens are counted.
        """
        state, rights = self._tenant(tenant), self.rights_of(tenant)
        max_requests, count = rights.max_requests_in_flight, len(state.in_flight)
        if max_requests and not request and count >= max_requests:
            limit = f"{count} requests in flight, the limit is {max_requests} (the tenant's max_requests_in_flight)"
            raise self._over_quota(state, "requests_in_flight", limit, state.load.seconds(1, 0))
        own_tokens = request.tokens if request else 0
        max_tokens = rights.max_tokens_in_flight
        excess = state.load.tokens - own_tokens + tokens - (max_tokens or math.inf)
        # A request that is larger than the limit is admitted alone, as it would never be admitted otherwise.
        if excess > 0 and count > bool(request):
            about = f"about {state.load.tokens} tokens in flight"
            limit = f"{about}, the limit is {max_tokens} (the tenant's max_tokens_in_flight)"
            raise self._over_quota(state, "tokens_in_flight", limit, state.load.seconds(0, excess))
        if (bucket := self._bucket(state, rights)) and (wait_s := bucket.wait_s(tokens, own_tokens)):
            limit = f"the limit is {rights.tokens_per_minute} tokens a minute (the tenant's tokens_per_minute)"
            raise self._over_quota(state, "tokens_per_minute", limit, wait_s)

    def enter(self, request: RequestLoad) -> None:
        """Counts a request that is admitted."""
        tenant = self._tenant(request.call.caller.tenant)
        tenant.in_flight[request] = None
        tenant.load.enter(request.tokens)
        if tenant.bucket:
            tenant.bucket.take(request.tokens)

    def correct(self, request: RequestLoad, more_tokens: int) -> None:
        """Adds the tokens of a request beyond the estimate."""
        tenant = self._tenant(request.call.caller.tenant)
        tenant.load.tokens += more_tokens
        if tenant.bucket:
            tenant.bucket.take(more_tokens)

    def leave(self, request: RequestLoad, *, is_answered: bool) -> None:
        """Counts the end of a request; see Load.leave.

        The budget pays the cost of the request, which may be more or less than it took.
        """
        tenant, cost = self._tenant(request.call.caller.tenant), request.cost
        del tenant.in_flight[request]
        tenant.load.leave(request.tokens, is_answered=is_answered)
        if cost:
            self._meters.counter(Metrics.TENANT_TOKENS, tenant.name).add(cost)
        if tenant.bucket:
            tenant.bucket.take(cost - request.tokens)

    def with_budgets(self) -> list[tuple[Tenant, TokenBucket]]:
        """Returns the tenants that have called and have a budget, each with its bucket."""
        return [(tenant, tenant.bucket) for tenant in self._tenants.values() if tenant.bucket]

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant has called recently."""
        return self._clock() - self._changed_s < _SEVERAL_S

    @asynccontextmanager
    async def turn(self, request: RequestLoad, model: ModelKey) -> AsyncIterator[Turn]:
        """Waits for the turn of the request, which runs in the block; see TenantTurns."""
        turns = self._turns.get(model) or self._turns.setdefault(model, TenantTurns(self._window_s, self._clock))
        tenant, tokens = request.call.caller.tenant, REQUEST_TOKENS + request.input_tokens
        turn = Turn(turns, tenant, self.rights_of(tenant).weight, tokens, is_bulk=request.call.is_bulk)
        began_s = self._clock()
        if tenant != self._last:
            self._changed_s = self._changed_s if self._last is None else began_s
            self._last = tenant
        await turns.take(turn)
        is_answered = False
        try:
            request.own_turn = turn
            self._tenant(tenant).waits.record((turn.began_s - began_s) * 1e9)
            yield turn
            is_answered = True
        finally:
            turns.give_back(turn, is_answered=is_answered)

    def furthest_over(self, tenant: str, tokens: int = 1) -> RequestLoad | None:
        """Returns the newest request of the tenant that has most of the limits for its weight, if the given tenant
        would have less even with this many tokens more; otherwise None.
        """
        own_use = self._weighted_use(self._tenant(tenant), 1, tokens)
        return newest_of_largest(self._tenants.values(), self._weighted_use, own_use)

    def _weighted_use(self, tenant: Tenant, more_requests: int, more_tokens: int) -> float:
        """Returns the part of the limits that a tenant has, relative to its weight."""
        requests, tokens = len(tenant.in_flight) + more_requests, tenant.load.tokens + more_tokens
        return max(requests / self._limits[0], tokens / self._limits[1]) / self.rights_of(tenant.name).weight

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = Tenant(name, self._meters)
        tenant.used_s = self._clock()
        return tenant

    def _forget_idle(self) -> None:
        """Forgets tenants that have not called for long, and more of the idle tenants if there are too many."""
        if len(self._tenants) < self._look_from:
            return
        idle = sorted((tenant for tenant in self._tenants.values() if tenant.is_idle), key=lambda idle: idle.used_s)
        old_s = self._clock() - _IDLE_S
        for number, tenant in enumerate(idle):
            if len(idle) - number > _MAX_IDLE or tenant.used_s < old_s:
                del self._tenants[tenant.name]
                tenant.forget(self._meters)
        # So that a flood of names costs little for each.
        self._look_from = len(self._tenants) + _MAX_IDLE

    def _bucket(self, tenant: Tenant, rights: Rights) -> TokenBucket | None:
        """Returns the tenant's budget, with the capacity that its rights have now."""
        if not rights.tokens_per_minute:
            tenant.bucket = None
        elif tenant.bucket is None:
            tenant.bucket = TokenBucket(rights.tokens_per_minute, self._clock)
        else:
            tenant.bucket.capacity = rights.tokens_per_minute
        return tenant.bucket

    def _over_quota(self, tenant: Tenant, quota: str, limit: str, wait_s: float) -> Overloaded:
        self._meters.counter(Metrics.TENANT_REFUSED, tenant.name, quota).add()
        # An infinite wait is no forecast: nothing drains yet.
        delay_s = retry_delay_s(wait_s if math.isfinite(wait_s) else 0, _LONGEST_RETRY_S)
        return Overloaded(f"tenant {tenant.name!r}: {limit}", delay_s)
