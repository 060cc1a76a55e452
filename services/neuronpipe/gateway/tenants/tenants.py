"""The tenants of a gateway: their requests inside the gate, their rights, and their token buckets."""

import math
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import Caller, check_tenant_name
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded, SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import Frozen, ModelTable, problems_of
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.load_shedding import Load, ModelLoad, TenantLoad
from neuronpipe.gateway.tenants.turns import REQUEST_TOKENS, Turn, Turns

_MINUTE_S = 60.0


class TokenBucket:
    """Holds the tokens of a minute at most, and gets them back evenly. The level may be negative: a debt, where a
    request took more than was there. It is kept whole.

    `capacity`: tokens a minute; may be changed. `share`: the part of it that counts here; less than 1 where several
    gateways have the same budget and do not know of each other. `taken`: since that was last told the others. `told`:
    the number of an exchange that is not answered yet, and the tokens that it tells.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.share = 1.0
        self.taken = 0
        self.told: tuple[int, int] | None = None
        self._clock = clock
        self._level = float(capacity)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """The tokens that are left now."""
        now_s = self._clock()
        most = self.capacity * self.share
        self._level = min(most, self._level + (now_s - self._at_s) * most / _MINUTE_S)
        self._at_s = now_s
        return self._level

    @level.setter
    def level(self, level: float) -> None:
        self._level, self._at_s = level, self._clock()

    def wait_s(self, tokens: int, taken: int = 0) -> float:
        """How long until there are so many; 0 where they are there. More than a minute's count as a minute's.
        `taken`: how many of them were taken already.
        """
        most = self.capacity * self.share
        missing = min(tokens, most) - (self.level + taken)
        return math.ceil(missing) * _MINUTE_S / most if missing > 0 else 0.0

    @property
    def is_full(self) -> bool:
        """Whether nothing is taken that has not come back, and the others know."""
        return not self.taken and self.level >= self.capacity * self.share

    def take(self, tokens: int) -> None:
        """Takes tokens out, also more than there are; puts them back where `tokens` is negative."""
        self.level = self.level - tokens
        self.taken += tokens


# The entry for tenants that have none of their own.
_OTHERS = "*"


_Quota: TypeAlias = Annotated[int, Field(ge=1, le=10**15)]


class Rights(Frozen):
    """The rights of a tenant. None: no limit."""

    models: frozenset[str] | None = None
    weight: float = Field(1.0, gt=0, le=1_000_000)
    max_requests_in_flight: _Quota | None = None
    max_tokens_in_flight: _Quota | None = None
    tokens_per_minute: _Quota | None = None
    max_jobs: _Quota | None = None
    acts_for_others: bool = False
    manages_registry: bool = False
    highest_priority: Literal["interactive", "bulk"] = "interactive"
    certificates: frozenset[str] = frozenset()


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
        """A tenant's rights: nothing, where the file does not name it."""
        return self.tenants.get(tenant) or self.tenants.get(_OTHERS) or NOTHING

    def tenant_of(self, name: str) -> str:
        """The tenant that a name in a certificate belongs to; empty for none."""
        return next((tenant for tenant, rights in self.tenants.items() if name in rights.certificates), "")


def parse_tenants(content: bytes) -> TenantBook:
    """The tenants of a file. Raises SetupError, which names the place at fault."""
    try:
        return TenantBook.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        raise SetupError(f"--tenants: {problems_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"--tenants: is no TOML in UTF-8: {error}") from error


EntryT = TypeVar("EntryT")

_QUOTAS = "requests_in_flight", "tokens_in_flight", "tokens_per_minute"
# A tenant is forgotten when it was idle for so long, with its metrics; or sooner, where there are so many idle ones.
_IDLE_S, _MAX_IDLE = 3600.0, 500
# Bounds of the time that a refused caller is told to wait.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 120.0
# For so long after another one's request, tenants count as several.
_SEVERAL_S = 2.0


@dataclass(slots=True, eq=False, kw_only=True)
class Admitted:
    """A request inside the gate.

    `of_tenant`: the tenant's load of the model. `tokens`: the tokens of the input plus `new_tokens`, the most tokens
    that the request generates. `shed`: ends the request, to make room for what `shed_for` then says. `own_turn`: the
    turn of its tenant in which the request runs.
    """

    call: Call
    model: "ModelLoad[Admitted]"
    of_tenant: "TenantLoad[Admitted]"
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
    def cost(self) -> int:
        """The cost of the request so far, in tokens. A request that never ran costs nothing."""
        return self.tokens - self.new_tokens + self.generated_tokens if self.own_turn else 0


class Tenant:
    """One tenant. `inside`: its requests, in the order of arrival. `used_s`: the time of its last request."""

    def __init__(self, name: str, meters: Meters) -> None:
        self.name = name
        self.inside: dict[Admitted, None] = {}
        self.load = Load()
        self.bucket: TokenBucket | None = None
        self.used_s = 0.0
        self.waits = meters.histogram(Metrics.TENANT_WAIT, name)
        meters.gauge(Metrics.TENANT_IN_FLIGHT, lambda: len(self.inside), name)
        # The number of gateways that have its budget, as far as is known.
        self.gateways = 1

    @property
    def is_idle(self) -> bool:
        """Whether it could be forgotten: it has nothing in flight, and no debt."""
        return not self.inside and (not self.bucket or self.bucket.is_full)

    def forget(self, meters: Meters) -> None:
        """Removes its metrics."""
        meters.remove(Metrics.TENANT_WAIT, self.name)
        meters.remove(Metrics.TENANT_IN_FLIGHT, self.name)
        meters.remove(Metrics.TENANT_TOKENS, self.name)
        for quota in _QUOTAS:
            meters.remove(Metrics.TENANT_REFUSED, self.name, quota)


class Shares:
    """What tenants hold for long, as places of calls that wait. One tenant has at most `times` as much as it leaves
    over (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998), so that some is left
    for the next one. Without tenants there is only the limit.
    """

    def __init__(self, limit: int, times: int = 1) -> None:
        self.limit = limit
        self.total = 0
        self._times = times
        self._of: Counter[str] = Counter()

    def has_room(self, tenant: str, amount: int = 1) -> bool:
        """Whether a tenant may take so much more."""
        left, own = self.limit - self.total - amount, self._of[tenant]
        return left >= 0 and (not tenant or not own or own + amount <= self._times * left)

    def take(self, tenant: str, amount: int = 1) -> None:
        """A tenant has more."""
        self.total += amount
        self._of[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """A tenant has less."""
        self.total -= amount
        self._of[tenant] -= amount
        if not self._of[tenant]:
            del self._of[tenant]


class Tenants:
    """All tenants of a gateway. `rights_of`: a tenant's rights at this time."""

    def __init__(
        self,
        rights_of: Callable[[str], Rights],
        limits: tuple[int, int],
        window_s: float,
        meters: Meters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: requests and tokens of the gate."""
        self._rights_of = rights_of
        self._limits = limits
        self._window_s = window_s
        self._meters = meters
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._turns: dict[ModelKey, Turns] = {}
        self._look_from = _MAX_IDLE
        # The tenant that asked last for a turn, and when that was another one than before.
        self._last: str | None = None
        self._changed_s = -math.inf

    def table_of(self, caller: Caller, table: ModelTable[EntryT]) -> ModelTable[EntryT]:
        """The models that a caller may use. Without a tenant it is the gateway itself, which sees all."""
        models = self.models_of(caller)
        return table if models is None else table.only(models)

    def models_of(self, caller: Caller) -> frozenset[str] | None:
        """The names of the models that a caller may use; None: all."""
        return self._rights_of(caller.tenant).models if caller.tenant else None

    def manages_registry(self, caller: Caller) -> bool:
        """Whether a caller may change the registry. Without a tenant nobody may where there are tenants."""
        return self._rights_of(caller.tenant).manages_registry

    def max_jobs(self, tenant: str) -> int:
        """The number of jobs of a tenant that may wait or run; 0 for no limit."""
        return self._rights_of(tenant).max_jobs or 0

    def is_interactive(self, tenant: str) -> bool:
        """Whether a tenant's requests and jobs may go before those of bulk work."""
        return self._rights_of(tenant).highest_priority == "interactive"

    def restrict(self, call: Call) -> Call:
        """The call with the highest priority that its tenant has, where it asks for more."""
        if call.is_bulk or self.is_interactive(call.caller.tenant):
            return call
        return replace(call, priority=Priority.PRIORITY_BULK)

    def weight_of(self, tenant: str) -> float:
        """A tenant's part of what all share."""
        return self._rights_of(tenant).weight

    def check(self, tenant: str, tokens: int = 1, inside: Admitted | None = None) -> None:
        """Raises Overloaded for one more request of so many tokens, where the tenant has its quota inside already.
        `inside`: the request, where it is one of those, and turns out to have so many.
        """
        one, rights = self._tenant(tenant), self._rights_of(tenant)
        most = rights.max_requests_in_flight
        if most and not inside and len(one.inside) >= most:
            limit = f"{len(one.inside)} requests in flight, the limit is {most} (the tenant's max_requests_in_flight)"
            raise self._over_quota(one, "requests_in_flight", limit, one.load.seconds(1, 0))
        own = inside.tokens if inside else 0
        excess = one.load.tokens - own + tokens - (rights.max_tokens_in_flight or math.inf)
        # A request that is larger than the limit is let in alone, or it never could be.
        if excess > 0 and len(one.inside) > bool(inside):
            most = rights.max_tokens_in_flight
            limit = f"about {one.load.tokens} tokens in flight, the limit is {most} (the tenant's max_tokens_in_flight)"
            raise self._over_quota(one, "tokens_in_flight", limit, one.load.seconds(0, excess))
        if (bucket := self._bucket(one, rights)) and (wait_s := bucket.wait_s(tokens, own)):
            limit = f"the limit is {rights.tokens_per_minute} tokens a minute (the tenant's tokens_per_minute)"
            raise self._over_quota(one, "tokens_per_minute", limit, wait_s)

    def enter(self, admission: Admitted) -> None:
        """Counts a request that `check` and the gate have let in."""
        one = self._tenant(admission.call.caller.tenant)
        one.inside[admission] = None
        one.load.enter(admission.tokens)
        if one.bucket:
            one.bucket.take(admission.tokens)

    def correct(self, admission: Admitted, more_tokens: int) -> None:
        """Adds the tokens that a request has beyond the estimate."""
        one = self._tenant(admission.call.caller.tenant)
        one.load.tokens += more_tokens
        if one.bucket:
            one.bucket.take(more_tokens)

    def leave(self, admission: Admitted, *, is_drained: bool) -> None:
        """Counts the end of a request. The budget pays its cost, which may be less than the request took, or more.

        `is_drained`: it was answered, which says how fast others will be.
        """
        one, cost = self._tenant(admission.call.caller.tenant), admission.cost
        del one.inside[admission]
        one.load.leave(admission.tokens, is_drained=is_drained)
        if cost:
            self._meters.counter(Metrics.TENANT_TOKENS, one.name).add(cost)
        if one.bucket:
            one.bucket.take(cost - admission.tokens)

    def with_budgets(self) -> list[tuple[Tenant, TokenBucket]]:
        """The tenants that have called and have a budget, which is with each."""
        return [(one, one.bucket) for one in self._tenants.values() if one.bucket]

    @property
    def are_several(self) -> bool:
        """Whether more than one has called of late."""
        return self._clock() - self._changed_s < _SEVERAL_S

    @asynccontextmanager
    async def turn(self, admission: Admitted, model: ModelKey) -> AsyncIterator[Turn]:
        """Waits for the turn of the request, which runs in the block; see Turns."""
        turns = self._turns.get(model) or self._turns.setdefault(model, Turns(self._window_s, self._clock))
        weight = self._rights_of(admission.call.caller.tenant).weight
        tokens = REQUEST_TOKENS + admission.tokens - admission.new_tokens
        turn = Turn(admission.call.caller.tenant, weight, tokens, is_bulk=admission.call.is_bulk)
        began_s = self._clock()
        if turn.tenant != self._last:
            self._changed_s = self._changed_s if self._last is None else began_s
            self._last = turn.tenant
        await turns.take(turn)
        is_answered = False
        try:
            admission.own_turn = turn
            self._tenant(turn.tenant).waits.record((turn.began_s - began_s) * 1e9)
            yield turn
            is_answered = True
        finally:
            turns.give_back(turn, is_answered=is_answered)

    def furthest_over(self, tenant: str, tokens: int = 1) -> Admitted | None:
        """The newest request of the tenant that has most of the gate for its weight, where the one that asks would
        still have less with so many tokens more; None else.
        """
        one = max((one for one in self._tenants.values() if one.inside), key=self._load, default=None)
        if one is None:
            return None
        newest = next(reversed(one.inside))
        has_more = self._load(one, -1, -newest.tokens) >= self._load(self._tenant(tenant), 1, tokens)
        return newest if has_more else None

    def _load(self, one: Tenant, more_requests: int = 0, more_tokens: int = 0) -> float:
        """The part of the gate that a tenant has, by its weight."""
        requests, tokens = len(one.inside) + more_requests, one.load.tokens + more_tokens
        return max(requests / self._limits[0], tokens / self._limits[1]) / self._rights_of(one.name).weight

    def _tenant(self, name: str) -> Tenant:
        one = self._tenants.get(name)
        if one is None:
            self._forget_idle()
            one = self._tenants[name] = Tenant(name, self._meters)
        one.used_s = self._clock()
        return one

    def _forget_idle(self) -> None:
        """Forgets tenants that have not asked for long, and the longest idle ones of too many."""
        if len(self._tenants) < self._look_from:
            return
        idle = sorted((one for one in self._tenants.values() if one.is_idle), key=lambda one: one.used_s)
        old_s = self._clock() - _IDLE_S
        for number, one in enumerate(idle):
            if len(idle) - number > _MAX_IDLE or one.used_s < old_s:
                del self._tenants[one.name]
                one.forget(self._meters)
        # So that a flood of names costs little for each.
        self._look_from = len(self._tenants) + _MAX_IDLE

    def _bucket(self, one: Tenant, rights: Rights) -> TokenBucket | None:
        """The tenant's budget, as its rights are now."""
        if not rights.tokens_per_minute:
            one.bucket = None
        elif one.bucket is None:
            one.bucket = TokenBucket(rights.tokens_per_minute, self._clock)
        else:
            one.bucket.capacity = rights.tokens_per_minute
        return one.bucket

    def _over_quota(self, one: Tenant, quota: str, limit: str, wait_s: float) -> Overloaded:
        self._meters.counter(Metrics.TENANT_REFUSED, one.name, quota).add()
        wait_s = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s if math.isfinite(wait_s) else _SHORTEST_WAIT_S))
        return Overloaded(f"tenant {one.name!r}: {limit}", wait_s)
