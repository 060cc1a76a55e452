"""Admission control: limits of the requests and tokens in flight.

Each request of a batch or a stream counts like a request that came alone.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Self

from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from neuronpipe.core.items import ModelKey
from neuronpipe.core.model import base_name
from neuronpipe.gateway.loads import Load, ModelLoad, RequestLoad, TenantLoad
from neuronpipe.gateway.tenant_turns import Turn
from neuronpipe.gateway.tenants.tenants import Tenants

# Share of the limits that bulk requests leave to interactive requests, so that a bulk request seldom has to end.
_INTERACTIVE_SHARE = 0.25
_LIMITS = "the gateway's max_requests_in_flight, max_tokens_in_flight"
# Refusals before reading share one error for this time, because a refusal must cost little.
_REFUSAL_LIFE_S = 0.02
_NO_TURN: AbstractAsyncContextManager[None] = nullcontext()


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(RequestLoad):
    """An admitted request, for as long as the block runs. `held`: the time for which the gateway held the request."""

    control: "AdmissionControl"
    input_bytes: int
    is_estimate: bool
    began_s: float
    held: HeldTime | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shed = _end_nothing  # the function may belong to the request, which has this admission
        is_late = kind is not None and issubclass(kind, DeadlineExceeded)
        if is_late and self.control.forecasts and not (self.held and self.held.service):
            self.note_late()
        if not self.is_shed:
            self.control.leave(self, is_answered=kind is None)

    @property
    def held_s(self) -> float:
        """The seconds for which the request was held."""
        return self.held.total_ns / 1e9 if self.held else 0.0

    def turn(self, model: ModelKey) -> AbstractAsyncContextManager[Turn | None]:
        """Waits for the turn of the tenant, which lasts as long as the block. Without tenants there is no turn."""
        return self.control.tenants.turn(self, model) if self.control.tenants else _NO_TURN

    def count(self, tokens: int, new_tokens: int = 0) -> None:
        """Replaces the estimates of the tokens of the input, unless these were known, and of generated tokens.

        `new_tokens`: the maximum number of generated tokens. Raises Overloaded without room beyond the estimates.
        """
        self.control.correct(self, tokens, new_tokens)

    def charge(self, tokens: int) -> None:
        """Counts tokens for the tenant's share when the request has generated them."""
        self.generated_tokens += tokens
        if turn := self.own_turn:
            turn.model_turns.charge(turn, tokens)

    def queue(self) -> None:
        """Lets other tenants run while the request waits in the executor, which shares its rows among tenants."""
        if turn := self.own_turn:
            turn.model_turns.queue(turn)

    def pause(self, *, is_paused: bool) -> None:
        """Gives the turn to others while the request waits in a stage before it computes."""
        if turn := self.own_turn:
            turn.model_turns.pause(turn, is_paused=is_paused)

    def note_late(self) -> None:
        """Records that this request missed its deadline, or will miss it."""
        deadline_s, sent_s = self.call.deadline_s, self.began_s + self.held_s
        self.model.note_late(self.tenant_load, None if deadline_s is None else deadline_s - sent_s)


@dataclass(frozen=True, slots=True)
class _Lateness:
    """The reason why a model would answer a tenant's next request too late.

    `excess_requests`: the requests that must leave before; infinite if its answer would be late in any case.
    """

    excess_requests: float
    model: ModelLoad
    tenant_load: TenantLoad

    def error(self, gateway: Load) -> NeuronpipeError:
        """Makes the error of the request. `gateway`: says how fast requests leave."""
        answer_s = self.tenant_load.answer_s
        takes = f": answers of model {self.model.name!r} take about {answer_s:.2g} s now" if answer_s else ""
        problem = f"the deadline would pass before the result is ready{takes}"
        if math.isinf(self.excess_requests):
            return DeadlineExceeded(problem)
        return Overloaded(problem, gateway.retry_after_s(int(self.excess_requests), 0))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The error of a request that was refused before it was read, which other requests of its tenant share."""

    tenant: str
    reason: object
    error: NeuronpipeError
    made_s: float = field(default_factory=time.monotonic)

    def is_for(self, tenant: str, reason: object) -> bool:
        """Returns whether a request that is refused now gets this error."""
        is_recent = time.monotonic() < self.made_s + _REFUSAL_LIFE_S
        return is_recent and (self.tenant, self.reason) == (tenant, reason)


def _end_nothing() -> None:
    """Replaces `shed` when the request has left."""


def _bulk_share(limit: int) -> int:
    return int(limit * (1 - _INTERACTIVE_SHARE))


class AdmissionControl:
    """Counts the requests and tokens in flight, and refuses requests beyond the limits.

    - `tenants`: the quotas and shares of tenants; None where callers are anonymous.
    - `model_limits`: maximum numbers of requests in flight of single models, over all versions.
    - `last_s`: the time.monotonic() when the last request came, or left.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        tenants: Tenants | None = None,
        model_limits: Mapping[str, int] | None = None,
        *,
        forecasts: bool = True,
    ) -> None:
        """`forecasts`: whether a missed deadline makes the control refuse requests that it forecasts to miss theirs."""
        self._limits = (max_requests, max_tokens)
        self.forecasts = forecasts
        self.tenants = tenants
        self._load = Load()
        self._models: dict[str, ModelLoad] = {}
        self._model_limits = model_limits or {}
        self.last_s = -math.inf
        self._bulk: dict[RequestLoad, None] = {}  # in the order of arrival
        self._last_refusal: _Refusal | None = None

    @property
    def in_flight(self) -> tuple[int, int]:
        """The requests and the tokens in flight."""
        return self._load.requests, self._load.tokens

    @property
    def fullness(self) -> float:
        """The fuller of the two limits (requests, tokens), as a share from 0 to 1."""
        return max(self._load.requests / self._limits[0], self._load.tokens / self._limits[1])

    def check_room(self, remaining_s: float | None, tenant: str = "") -> None:
        """Refuses requests before they are read, when their models are not known yet. A request is refused if each
        model that its tenant called recently would refuse it. A limit of requests must be here and in `admit`.

        `remaining_s`: the time until the request's deadline; None for none. Raises Overloaded if no place is free, or
        none will be free by the deadline, and DeadlineExceeded if an answer would be late in any case.
        """
        is_full = self._load.requests >= self._limits[0] and not self._bulk
        if self.tenants:
            self.tenants.check(tenant)
            if is_full and self.tenants.furthest_over(tenant):
                is_full = False  # the load is another tenant's, who makes room
        late = None if is_full else self._late_everywhere(remaining_s, tenant)
        if is_full or late:
            reason, last = late and (late.model, math.isinf(late.excess_requests)), self._last_refusal
            if not last or not last.is_for(tenant, reason):
                error = late.error(self._load) if late else self._full((1, 0))
                last = self._last_refusal = _Refusal(tenant, reason, error)
            raise last.error.with_traceback(None)  # each raise would add its frames, which keep the request's data

    def admit(
        self,
        call: Call,
        input_bytes: int,
        known_tokens: int | None = None,
        *,
        model: str,
        new_tokens: int = 0,
        shed: Callable[[], None],
        held: HeldTime | None = None,
    ) -> Admission:
        """Admits a request. Use the admission as a context manager; its end releases the place.

        Raises Overloaded if there is no room, and DeadlineExceeded if the model is overloaded and no answer would be
        ready in time.

        - `known_tokens`: the cost of the input, where it is known before the input is tokenized; otherwise it is
          estimated from the bytes.
        - `new_tokens`: the maximum number of tokens that the request generates.
        - `held`: the time for which the request was held.
        - `shed`: ends the request to make room: a bulk request for an interactive request, or a request of a tenant
          that has more than its share of the limits or of the model. The newest requests end first; `is_shed` is set.
        """
        model = model if model in self._model_limits else base_name(model)  # adapters share the limit of their base
        load = self._models.get(model)
        if load is None:
            load = self._models[model] = ModelLoad(model, self._model_limits.get(model, 0))
        tenant, weight = call.caller.tenant, 1.0
        tenant_load = load.ensure_tenant_load(tenant)
        input_tokens = tenant_load.estimated_tokens(input_bytes) if known_tokens is None else known_tokens
        admission = Admission(
            control=self,
            model=load,
            tenant_load=tenant_load,
            call=call,
            input_bytes=input_bytes,
            tokens=input_tokens + new_tokens,
            new_tokens=new_tokens,
            is_estimate=known_tokens is None,
            shed=shed,
            began_s=time.monotonic(),
            held=held,
        )
        if self.tenants:
            self.tenants.check(tenant, admission.tokens)
            weight = self.tenants.rights_of(tenant).weight
        if excess_requests := load.excess_requests(tenant_load, weight, call.remaining_s):
            raise _Lateness(excess_requests, load, tenant_load).error(self._load)
        in_its_place = self._in_its_place(load, tenant_load, weight)
        self._make_room(admission, 1, admission.tokens)
        if in_its_place and not in_its_place.is_shed:
            self._shed(in_its_place, f"a tenant that has less of model {model!r} (the gateway's model_concurrency)")
        self._put_in(admission, weight)
        return admission

    def leave(self, admission: Admission, *, is_answered: bool) -> None:
        """Counts the end of a request that was not shed."""
        if is_answered:
            answer_s = time.monotonic() - admission.began_s - admission.held_s
            admission.model.note_answer(admission.tenant_load, answer_s)
        self._take_out(admission, is_answered=is_answered)

    def correct(self, admission: Admission, tokens: int, new_tokens: int) -> None:
        """Replaces the estimates by a request's real tokens. Raises Overloaded where there is no room for the rest."""
        estimated = admission.input_tokens
        if admission.is_estimate:
            admission.tenant_load.learn_tokens(admission.input_bytes, tokens)
        else:
            tokens = estimated
        more = tokens + new_tokens - admission.tokens
        if more and not admission.is_shed:
            if more > 0:
                if self.tenants:
                    self.tenants.check(admission.call.caller.tenant, tokens + new_tokens, admission)
                self._make_room(admission, 0, more)
            self._grow(admission, more)
        if turn := admission.own_turn:
            turn.model_turns.resize(turn, tokens - estimated)
        admission.tokens, admission.new_tokens = tokens + new_tokens, new_tokens

    def shed_error(self, admission: Admission) -> Overloaded:
        """Makes the error of a request that had to end, with the time in which a request of its size drains."""
        problem = f"the request was ended to make room for {admission.shed_for}"
        return Overloaded(problem, self._load.retry_after_s(1, admission.tokens))

    def _full(self, excess: tuple[int, int], *, is_bulk: bool = False) -> Overloaded:
        """Makes the error of a request for which there is no room, with the time that the excess takes to drain.

        With tenants, the error does not reveal the number of requests in flight.
        """
        in_flight, limit, unit, setting = self._load.requests, self._limits[0], "requests", "max_requests_in_flight"
        if not excess[0]:
            in_flight, limit, unit, setting = self._load.tokens, self._limits[1], "tokens", "max_tokens_in_flight"
        shown = f"the limit is {limit} (the gateway's {setting})"
        if is_bulk:
            shown = f"the limit of bulk requests is {_bulk_share(limit)} (of the gateway's {setting}, {limit})"
        count = "too many" if self.tenants else f"about {in_flight}" if unit == "tokens" else f"{in_flight}"
        return Overloaded(f"{count} {unit} in flight, {shown}", self._load.retry_after_s(*excess))

    def _late_everywhere(self, remaining_s: float | None, tenant: str) -> "_Lateness | None":
        """Returns the least lateness among the tenant's recent models; None if a model takes the request."""
        if remaining_s is None:
            return None
        now_s, models = time.monotonic(), []
        for load in self._models.values():
            if tenant_load := load.tenant_load(tenant):
                if now_s >= load.overloaded_until_s:  # the usual case
                    return None
                models.append((load, tenant_load))
        if not models:
            return None
        weight = self.tenants.rights_of(tenant).weight if self.tenants else 1.0
        latenesses = (
            _Lateness(load.excess_requests(tenant_load, weight, remaining_s), load, tenant_load)
            for load, tenant_load in models
        )
        least = min(latenesses, key=attrgetter("excess_requests"))
        return least if least.excess_requests else None

    def _in_its_place(self, load: ModelLoad, tenant_load: TenantLoad, weight: float) -> RequestLoad | None:
        """Returns the request that must end so that a tenant's next request fits; None if the next request fits. Raises
        Overloaded.
        """
        if not load.limit or load.load.requests < load.limit:
            return None
        if other := load.furthest_over(tenant_load, weight):
            return other
        raise Overloaded(
            f"model {load.name!r}: {load.load.requests} requests in flight, the limit is {load.limit} (the gateway's "
            "model_concurrency)",
            load.load.retry_after_s(1, 0),
        )

    def _make_room(self, admission: Admission, requests: int, tokens: int) -> None:
        """Sheds other requests to make room for this many more. Raises Overloaded where that is not possible."""
        is_bulk = admission.call.is_bulk
        excess = self._excess(requests, tokens, is_bulk=is_bulk)
        if excess and not is_bulk and not self._excess(requests, tokens, is_bulk=False, without=self._bulk):
            while excess:
                self._shed(next(reversed(self._bulk)), f"interactive requests ({_LIMITS})")
                excess = self._excess(requests, tokens, is_bulk=False)
        while excess and self.tenants and (other := self.tenants.furthest_over(admission.call.caller.tenant, tokens)):
            self._shed(other, f"a tenant that has less of the gateway ({_LIMITS})")
            excess = self._excess(requests, tokens, is_bulk=is_bulk)
        if excess:
            raise self._full(excess, is_bulk=is_bulk)

    def _excess(
        self, more_requests: int, more_tokens: int, *, is_bulk: bool, without: Collection[RequestLoad] = ()
    ) -> tuple[int, int] | None:
        """Returns by how many requests and tokens this many more would exceed the limits; None if they fit.

        `without`: requests in flight that are not counted. A request larger than the limits is admitted alone, as it
        would never be admitted otherwise.
        """
        requests, tokens = self._load.requests + more_requests, self._load.tokens + more_tokens
        if without:
            requests -= len(without)
            tokens -= sum(request.tokens for request in without)
        if requests <= 1:
            return None
        most_requests, most_tokens = map(_bulk_share, self._limits) if is_bulk else self._limits
        # A request that is admitted already has its place: only its tokens are in question.
        excess = requests - most_requests if more_requests else 0, tokens - most_tokens
        return (max(0, excess[0]), max(0, excess[1])) if max(excess) > 0 else None

    def _shed(self, request: RequestLoad, room_for: str) -> None:
        request.shed_for = room_for
        self._take_out(request, is_answered=False)
        request.shed()

    def _put_in(self, admission: Admission, weight: float) -> None:
        """Counts a request in the three accounts: all requests, its model, and its tenant."""
        self._load.enter(admission.tokens)
        admission.model.enter(admission, weight)
        self.last_s = admission.began_s
        if admission.call.is_bulk:
            self._bulk[admission] = None
        if self.tenants:
            self.tenants.enter(admission)

    def _grow(self, request: RequestLoad, more_tokens: int) -> None:
        self._load.tokens += more_tokens
        request.model.load.tokens += more_tokens
        if self.tenants:
            self.tenants.correct(request, more_tokens)

    def _take_out(self, request: RequestLoad, *, is_answered: bool) -> None:
        self._bulk.pop(request, None)
        self._load.leave(request.tokens, is_answered=is_answered)
        request.model.leave(request, is_answered=is_answered)
        if not self._load.requests:
            self.last_s = time.monotonic()
        if self.tenants:
            self.tenants.leave(request, is_answered=is_answered)
