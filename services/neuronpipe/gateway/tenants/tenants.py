"""What tenants have inside the gate, and what their rights allow them: the file of the tenants, and token buckets."""

import math
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded, SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import ModelTable
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.load_shedding import DrainRate
from neuronpipe.gateway.tenants.turns import Turn, Turns

_MINUTE_S = 60.0


class TokenBucket:
    """Holds the tokens of a minute at most, and gets them back evenly. The level may be negative: a debt, where a
    request took more than was there.

    `capacity`: tokens a minute; may be changed. `share`: the part of it that counts here; less than 1 where several
    gateways have the same budget and do not know of each other. `taken`: since that was last told the others.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.share = 1.0
        self.taken = 0
        self._clock = clock
        self._level = float(capacity)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """What is left now."""
        now_s = self._clock()
        most = self.capacity * self.share
        self._level = min(most, self._level + (now_s - self._at_s) * most / _MINUTE_S)
        self._at_s = now_s
        return self._level

    @level.setter
    def level(self, level: float) -> None:
        self._level, self._at_s = max(-float(self.capacity), level), self._clock()

    def wait_s(self, tokens: int) -> float:
        """How long until there are so many; 0 where they are there. More than a minute's count as a minute's."""
        most = self.capacity * self.share
        missing = min(tokens, most) - self.level
        return math.ceil(missing) * _MINUTE_S / most if missing > 0 else 0.0

    def take(self, tokens: int) -> None:
        """Takes tokens out, also more than there are; puts them back where `tokens` is negative."""
        self.level = self.level - tokens
        self.taken += tokens


# The entry for tenants that have none of their own.
_OTHERS = "*"


class Rights(BaseModel):
    """What a tenant may do. None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: frozenset[str] | None = None
    weight: float = Field(1.0, gt=0, le=1_000_000)
    max_requests_in_flight: int | None = Field(None, ge=1)
    max_tokens_in_flight: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_jobs: int | None = Field(None, ge=1)
    acts_for_others: bool = False
    manages_registry: bool = False
    highest_priority: Literal["interactive", "bulk"] = "interactive"
    certificates: frozenset[str] = frozenset()


NOTHING = Rights(models=frozenset())
EVERYTHING = Rights()


class TenantBook(BaseModel):
    """All tenants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, Rights]

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"--tenants: is no TOML in UTF-8: {error}") from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise SetupError(f"--tenants: {'; '.join(problems)}") from error


EntryT = TypeVar("EntryT")

# Of a refused caller. A tenant's debt is two minutes' tokens at most.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 120.0


@dataclass(slots=True, eq=False, kw_only=True)
class Admitted:
    """A request inside the gate. `shed`: called where it must end, to make room; `is_shed` is set then."""

    call: Call
    tokens: int
    shed: Callable[[], None]
    is_shed: bool = False
    has_run: bool = False


class Tenant:
    """One tenant."""

    def __init__(self, name: str, meters: Meters) -> None:
        self.name = name
        self.inside: dict[Admitted, None] = {}  # in the order in which they came
        self.tokens = 0
        self.drained = DrainRate()
        self.bucket: TokenBucket | None = None
        self.waits = meters.histogram(Metrics.TENANT_WAIT, name)
        meters.gauge(Metrics.TENANT_IN_FLIGHT, lambda: len(self.inside), name)
        # That have its budget, as far as is known.
        self.gateways = 1


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
        """How many jobs of a tenant may wait or run; 0 for no limit."""
        return self._rights_of(tenant).max_jobs or 0

    def restrict(self, call: Call) -> Call:
        """The call with the highest priority that its tenant has, where it asks for more."""
        if call.is_bulk or self._rights_of(call.caller.tenant).highest_priority == "interactive":
            return call
        return replace(call, priority=Priority.PRIORITY_BULK)

    def check(self, tenant: str, tokens: int = 1) -> None:
        """Raises Overloaded for one more request of so many tokens, where the tenant has its quota inside already."""
        one, rights = self._tenant(tenant), self._rights_of(tenant)
        if rights.max_requests_in_flight and len(one.inside) >= rights.max_requests_in_flight:
            limit = f"{len(one.inside)} requests in flight, the limit is {rights.max_requests_in_flight}"
            raise self._over_quota(one, "requests_in_flight", limit, one.drained.seconds(1, 0))
        # A request that is larger than the limit is let in alone, or it never could be.
        if rights.max_tokens_in_flight and one.inside and one.tokens + tokens > rights.max_tokens_in_flight:
            limit = f"about {one.tokens} tokens in flight, the limit is {rights.max_tokens_in_flight}"
            excess = one.tokens + tokens - rights.max_tokens_in_flight
            raise self._over_quota(one, "tokens_in_flight", limit, one.drained.seconds(0, excess))
        if (bucket := self._bucket(one, rights)) and (wait_s := bucket.wait_s(tokens)):
            limit = f"the limit is {rights.tokens_per_minute} tokens a minute"
            raise self._over_quota(one, "tokens_per_minute", limit, wait_s)

    def enter(self, admission: Admitted) -> None:
        """A request that `check` and the gate have let in."""
        one = self._tenant(admission.call.caller.tenant)
        one.inside[admission] = None
        self._count(one, admission.tokens)

    def correct(self, admission: Admitted, more_tokens: int) -> None:
        """A request has so many tokens more than was thought. What it took too much of its budget is a debt."""
        self._count(self._tenant(admission.call.caller.tenant), more_tokens)

    def leave(self, admission: Admitted) -> None:
        """The end of a request. One that never ran costs nothing."""
        one = self._tenant(admission.call.caller.tenant)
        del one.inside[admission]
        one.tokens -= admission.tokens
        if admission.has_run:
            one.drained.add(1, admission.tokens)
            self._meters.counter(Metrics.TENANT_TOKENS, one.name).add(admission.tokens)
        elif one.bucket:
            one.bucket.take(-admission.tokens)

    def with_budgets(self) -> list[Tenant]:
        """The tenants that have called and have a budget."""
        return [one for one in self._tenants.values() if one.bucket]

    @asynccontextmanager
    async def turn(self, admission: Admitted, model: ModelKey) -> AsyncIterator[Call]:
        """Waits until the request may run, which it does in the block, with the call that it yields; see Turns."""
        turns = self._turns.get(model) or self._turns.setdefault(model, Turns(self._window_s, self._clock))
        weight = self._rights_of(admission.call.caller.tenant).weight
        turn = Turn(admission.call.caller.tenant, weight, admission.tokens, is_bulk=admission.call.is_bulk)
        began_s = self._clock()
        await turns.take(turn)
        is_answered = False
        try:
            admission.has_run = True
            self._tenant(turn.tenant).waits.record((turn.began_s - began_s) * 1e9)
            yield replace(admission.call, is_beyond_share=turn.is_beyond_share)
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
        requests, tokens = len(one.inside) + more_requests, one.tokens + more_tokens
        return max(requests / self._limits[0], tokens / self._limits[1]) / self._rights_of(one.name).weight

    def _tenant(self, name: str) -> Tenant:
        one = self._tenants.get(name)
        if one is None:
            one = self._tenants[name] = Tenant(name, self._meters)
        return one

    def _bucket(self, one: Tenant, rights: Rights) -> TokenBucket | None:
        """The tenant's budget, as its rights are now."""
        if not rights.tokens_per_minute:
            one.bucket = None
        elif one.bucket is None:
            one.bucket = TokenBucket(rights.tokens_per_minute, self._clock)
        else:
            one.bucket.capacity = rights.tokens_per_minute
        return one.bucket

    def _count(self, one: Tenant, tokens: int) -> None:
        one.tokens += tokens
        if one.bucket:
            one.bucket.take(tokens)

    def _over_quota(self, one: Tenant, quota: str, limit: str, wait_s: float) -> Overloaded:
        self._meters.counter(Metrics.TENANT_REFUSED, one.name, quota).add()
        wait_s = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s if math.isfinite(wait_s) else _SHORTEST_WAIT_S))
        return Overloaded(f"tenant {one.name!r}: {limit}", wait_s)
