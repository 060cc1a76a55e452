"""The order of the requests of a model, where several tenants want more than the model can compute.

A window limits the tokens of a model that run at once to about what the model computes in `window_s`. Further requests
wait for their tenant's turn. The tenant that ran the least for its weight in the last seconds is next. A tenant below
its share also runs beside the others, so that it does not wait for what they have borrowed.

Turns only order requests; admission.py refuses or ends them, and the executor's tenant_shares.py divides rows and
blocks. docs/overload.md ("Where a request waits") has the whole.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

# Tokens that a request costs in addition to its own: the services compute for a request as long as a model for 32
# tokens. Otherwise a tenant of many tiny requests would get nearly all of their time.
REQUEST_TOKENS = 32
# This many requests may always run: the model computes the first while the second is on its way.
_MIN_RUNNING = 2
# This many requests of a tenant may always wait in the executor for their first token: there, a step takes several.
_MIN_QUEUED = 16
# The smallest window of a model, in quickest answers: otherwise the batches of a slow model would be too small.
_QUICKEST_ANSWERS = 3
# The time over which the rate is an average, in seconds in which something ran.
_RATE_WINDOW_S = 0.5
# Tenants below their shares run beside others while at most this many windows are full.
_MOST_WINDOWS = 2
# The time over which the best rate fades.
_RATE_MEMORY_S = 60.0
# The time over which the tokens of a tenant count, in seconds, and the interval at which they fade.
_MEMORY_S, _FADE_EVERY_S = 5.0, 0.1


@dataclass(slots=True, eq=False)
class Turn:
    """A request that runs, or waits for its turn to run.

    - `model_turns`: the turns of its model.
    - `tokens`: the tokens of its input and `REQUEST_TOKENS`, which run at once; generated tokens count for the share of
      its tenant only.
    - `is_beyond_share`: set when the request begins to run.
    - `is_queued`: whether it waits in the executor for its first token.
    """

    model_turns: "TenantTurns"
    tenant: str
    weight: float
    tokens: int
    is_bulk: bool
    began_s: float = 0.0
    is_beyond_share: bool = False
    is_paused: bool = False
    is_queued: bool = False
    future: asyncio.Future[None] | None = None


class _TenantRequests:
    """The requests of one tenant for a model. `used_tokens`: the tokens that ran recently, which fade. `turns`: the
    number of requests that run or wait. `queued` and `queued_tokens`: the requests that wait in the executor, and their
    tokens. `waiting`: interactive and bulk requests, each in the order of arrival.
    """

    __slots__ = ("queued", "queued_tokens", "running_tokens", "turns", "used_tokens", "waiting", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.turns = self.running_tokens = self.queued = self.queued_tokens = 0
        self.used_tokens = 0.0
        self.waiting: tuple[dict[Turn, None], dict[Turn, None]] = {}, {}

    def may_queue(self, window_tokens: float) -> bool:
        """Returns whether another request of the tenant may run, which may be the next request in the executor."""
        return self.queued < _MIN_QUEUED or self.queued_tokens < window_tokens


class TenantTurns:
    """The turns of one model."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        # Queued and paused requests are no part of the window, but the model may be busy with them.
        self._running = self._queued = self._paused = 0
        self._running_tokens = 0
        # The tenants with requests that run, wait, or ran recently.
        self._tenants: dict[str, _TenantRequests] = {}
        self._waiting = 0
        # The weights of all tenants with requests that run or wait, and the tokens of all tenants that ran recently.
        self._weights = self._used_tokens = 0.0
        # The answered tokens, and the time in which requests ran; both fade.
        self._answered_tokens = self._busy_s = 0.0
        # The best recent rate of answered tokens: a model that has little to do shows less than it can.
        self._best_rate = 0.0
        self._at_s = clock()
        self._quickest_s = math.inf
        self._faded_s = self._at_s

    @property
    def window_tokens(self) -> float:
        """The number of tokens that may run at once; infinite until the first answer."""
        if math.isinf(self._quickest_s):
            return math.inf
        window_s = max(self._window_s, _QUICKEST_ANSWERS * self._quickest_s)
        return window_s * self._best_rate

    async def take(self, turn: Turn) -> None:
        """Waits until the request may run. Then, and only then, `give_back` must be called."""
        tenant = self._tenants.get(turn.tenant) or self._tenants.setdefault(turn.tenant, _TenantRequests())
        if tenant.turns:
            self._weights -= tenant.weight
        tenant.turns += 1
        tenant.weight = turn.weight
        self._weights += turn.weight
        queue = tenant.waiting[turn.is_bulk]
        if not queue and self._may_run(turn, is_next=not self._waiting):
            self._run(turn)
            return
        queue[turn] = None
        self._waiting += 1
        turn.future = asyncio.get_running_loop().create_future()
        # Earlier requests may wait only because their tenant's queue in the executor is full.
        if self._queued:
            self._run_next()
        try:
            await turn.future
        except asyncio.CancelledError:
            if turn.future.cancelled():
                self._leave_queue(turn)
                self._end_turn(tenant)
            else:
                self.give_back(turn, is_answered=False)
            raise

    def give_back(self, turn: Turn, *, is_answered: bool) -> None:
        """Counts the end of a request that ran, and runs the next requests."""
        self._pass_time()
        if is_answered:
            self._answered_tokens += turn.tokens
            self._quickest_s = min(self._quickest_s, self._at_s - turn.began_s)
            if self._busy_s:
                self._best_rate = max(self._best_rate, self._answered_tokens / self._busy_s)
        if turn.is_paused:
            self._paused -= 1
        else:
            self._leave(turn)
        self._end_turn(self._tenants[turn.tenant])
        self._run_next()

    def queue(self, turn: Turn) -> None:
        """Takes a request that generates out of the window until its first token: the executor shares its rows among
        tenants itself. Each tenant has a window of its own for such requests.
        """
        self._pass_time()
        self._leave(turn)
        turn.is_queued = True
        self._enter(turn)
        self._run_next()

    def pause(self, turn: Turn, *, is_paused: bool) -> None:
        """Takes a request that runs out of the window while it waits for something other than the model."""
        if turn.is_paused != is_paused:
            self._pass_time()
            turn.is_paused = is_paused
            self._paused += 1 if is_paused else -1
            if is_paused:
                self._leave(turn)
            else:
                self._enter(turn)
            self._run_next()

    def charge(self, turn: Turn, tokens: int) -> None:
        """Adds tokens, which may be negative, to the cost of a request that runs."""
        if tenant := self._tenants.get(turn.tenant):
            tenant.used_tokens += tokens
            self._used_tokens += tokens

    def resize(self, turn: Turn, more: int) -> None:
        """Corrects the tokens of a request that runs by `more`, which may be negative."""
        turn.tokens += more
        if not turn.is_paused:
            self._count(turn, 0, more)
        self.charge(turn, more)

    def _run(self, turn: Turn) -> None:
        self._pass_time()
        turn.began_s = self._at_s
        turn.is_beyond_share = self._beyond_share(turn) > 0
        self._enter(turn)
        self.charge(turn, turn.tokens)
        if turn.future:
            turn.future.set_result(None)

    def _enter(self, turn: Turn) -> None:
        self._count(turn, 1, turn.tokens)

    def _leave(self, turn: Turn) -> None:
        self._count(turn, -1, -turn.tokens)

    def _count(self, turn: Turn, requests: int, tokens: int) -> None:
        """Adds to the running requests and their tokens, or to the queued requests, as the request is one of these."""
        tenant = self._tenants[turn.tenant]
        if turn.is_queued:
            self._queued += requests
            tenant.queued += requests
            tenant.queued_tokens += tokens
        else:
            self._running += requests
            self._running_tokens += tokens
            tenant.running_tokens += tokens

    def _run_next(self) -> None:
        while turn := self._next():
            self._leave_queue(turn)
            self._run(turn)

    def _leave_queue(self, turn: Turn) -> None:
        del self._tenants[turn.tenant].waiting[turn.is_bulk][turn]
        self._waiting -= 1

    def _end_turn(self, tenant: _TenantRequests) -> None:
        tenant.turns -= 1
        if not tenant.turns:
            self._weights -= tenant.weight

    def _next(self) -> Turn | None:
        """Returns the next turn, if it may run now."""
        window = self.window_tokens
        for is_bulk in (False, True):
            # A request that was cancelled stays in its queue until its task runs.
            firsts = [
                (tenant.used_tokens / tenant.weight, turn)
                for tenant in self._tenants.values()
                if tenant.may_queue(window)
                and (turn := next((turn for turn in tenant.waiting[is_bulk] if _is_waiting(turn)), None))
            ]
            if firsts:
                _, turn = min(firsts, key=itemgetter(0))
                return turn if self._may_run(turn, is_next=True) else None
        return None

    def _may_run(self, turn: Turn, *, is_next: bool) -> bool:
        window, tenant = self.window_tokens, self._tenants[turn.tenant]
        if not tenant.may_queue(window):
            return False
        if is_next and (self._running < _MIN_RUNNING or self._running_tokens < window):
            return True
        if turn.is_bulk or self._running_tokens >= _MOST_WINDOWS * window:
            return False
        is_below_share = self._beyond_share(turn) < 0
        return tenant.running_tokens < (window if is_below_share else self._share(turn) * window)

    def _share(self, turn: Turn) -> float:
        """Returns the part of all weights that the tenant of a turn has."""
        return turn.weight / self._weights

    def _beyond_share(self, turn: Turn) -> float:
        """Returns the recent tokens of the tenant beyond its share of the recent tokens of all tenants."""
        return self._tenants[turn.tenant].used_tokens - self._share(turn) * self._used_tokens

    def _pass_time(self) -> None:
        now_s = self._clock()
        if now_s - self._faded_s >= _FADE_EVERY_S:
            passed_s, self._faded_s = now_s - self._faded_s, now_s
            memory_factor = math.exp(-passed_s / _MEMORY_S)
            for tenant in self._tenants.values():
                tenant.used_tokens *= memory_factor
            self._tenants = {
                name: tenant for name, tenant in self._tenants.items() if tenant.turns or tenant.used_tokens >= 1
            }
            self._used_tokens = sum(tenant.used_tokens for tenant in self._tenants.values())
            self._weights = sum(tenant.weight for tenant in self._tenants.values() if tenant.turns)
            self._best_rate *= math.exp(-passed_s / _RATE_MEMORY_S)
        if self._running or self._queued or self._paused:
            passed_s = now_s - self._at_s
            rate_factor = math.exp(-passed_s / _RATE_WINDOW_S)
            self._answered_tokens *= rate_factor
            self._busy_s = self._busy_s * rate_factor + passed_s
        self._at_s = now_s


def _is_waiting(turn: Turn) -> bool:
    return turn.future is not None and not turn.future.done()
