"""Whose request of a model runs next, where several tenants want more than it can do.

A window says how many tokens of a model run at once: about what it computes in `window_s`. Further requests wait for
their tenant's turn. The tenant that ran the least for its weight in the last seconds is next. So that it need not wait
for what others have borrowed, a tenant that is below its share runs beside them.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

# So many requests may always run: one is computed while the next one is on its way.
_MIN_RUNNING = 2
# The window of a model whose quickest answer takes long: so many of these, or its batches would be too small.
_QUICKEST_ANSWERS = 3
# The time over which the rate is an average, in seconds in which something ran.
_RATE_WINDOW_S = 0.5
# Tenants below their shares run beside others while no more than so many windows are full.
_MOST_WINDOWS = 2
# The time over which the best rate fades.
_RATE_MEMORY_S = 60.0
# The time over which it counts what a tenant ran, in seconds, and how often that fades.
_MEMORY_S, _FADE_EVERY_S = 5.0, 0.1


class Turn:
    """A request that runs, or waits to."""

    __slots__ = ("began_s", "future", "is_beyond_share", "is_bulk", "tenant", "tokens", "weight")

    def __init__(self, tenant: str, weight: float, tokens: int, *, is_bulk: bool) -> None:
        self.tenant = tenant
        self.weight = weight
        self.tokens = max(1, tokens)
        self.is_bulk = is_bulk
        self.began_s = 0.0
        # Known when it begins to run.
        self.is_beyond_share = False
        self.future: asyncio.Future[None] | None = None


class Turns:
    """The turns of one model."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._running = 0
        self._running_tokens = 0
        self._running_of: Counter[str] = Counter()
        # Tokens that tenants ran of late, which fade.
        self._used_of: dict[str, float] = {}
        # Interactive requests and bulk ones, each tenant's in the order of arrival.
        self._waiting: tuple[dict[str, dict[Turn, None]], dict[str, dict[Turn, None]]] = {}, {}
        # Of tenants that have something running or waiting.
        self._weights: dict[str, float] = {}
        # Tokens that were answered, and the time in which something ran; both fade.
        self._answered_tokens = self._busy_s = 0.0
        # The best of late of one by the other, as a model that has little to do shows less than it can.
        self._best_rate = 0.0
        self._at_s = clock()
        self._quickest_s = math.inf
        self._faded_s = self._at_s

    @property
    def window_tokens(self) -> float:
        """How many tokens may run at once; without end until the first answer."""
        if math.isinf(self._quickest_s):
            return math.inf
        window_s = max(self._window_s, _QUICKEST_ANSWERS * self._quickest_s)
        return window_s * self._best_rate

    async def take(self, turn: Turn) -> None:
        """Waits until the request may run. Then, and only then, `give_back` must be called."""
        self._weights[turn.tenant] = turn.weight
        queue = self._waiting[turn.is_bulk].get(turn.tenant)
        if not queue and self._may_run(turn, is_next=not any(self._waiting)):
            self._run(turn)
            return
        self._waiting[turn.is_bulk].setdefault(turn.tenant, {})[turn] = None
        turn.future = asyncio.get_running_loop().create_future()
        try:
            await turn.future
        except asyncio.CancelledError:
            if turn.future.cancelled():
                self._leave_queue(turn)
                self._forget(turn.tenant)
            else:
                self.give_back(turn, is_answered=False)
            raise

    def give_back(self, turn: Turn, *, is_answered: bool) -> None:
        """The end of a request that ran."""
        self._pass_time()
        if is_answered:
            self._answered_tokens += turn.tokens
            self._quickest_s = min(self._quickest_s, self._at_s - turn.began_s)
            if self._busy_s:
                self._best_rate = max(self._best_rate, self._answered_tokens / self._busy_s)
        self._running -= 1
        self._running_tokens -= turn.tokens
        self._running_of[turn.tenant] -= turn.tokens
        self._forget(turn.tenant)
        while next_turn := self._next():
            self._leave_queue(next_turn)
            self._run(next_turn)

    def _run(self, turn: Turn) -> None:
        self._pass_time()
        turn.began_s = self._at_s
        turn.is_beyond_share = self._beyond_share(turn) > 0
        self._running += 1
        self._running_tokens += turn.tokens
        self._running_of[turn.tenant] += turn.tokens
        self._used_of[turn.tenant] = self._used_of.get(turn.tenant, 0.0) + turn.tokens
        if turn.future:
            turn.future.set_result(None)

    def _next(self) -> Turn | None:
        """The turn that is next, where it may run now."""
        for waiting in self._waiting:
            # One that was cancelled is still in its queue until its task runs.
            firsts = [next((turn for turn in queue if _is_waiting(turn)), None) for queue in waiting.values()]
            if turn := min(filter(None, firsts), key=self._used, default=None):
                return turn if self._may_run(turn, is_next=True) else None
        return None

    def _used(self, turn: Turn) -> float:
        """What its tenant ran of late, by its weight."""
        return self._used_of.get(turn.tenant, 0.0) / turn.weight

    def _may_run(self, turn: Turn, *, is_next: bool) -> bool:
        window = self.window_tokens
        if is_next and (self._running < _MIN_RUNNING or self._running_tokens < window):
            return True
        if turn.is_bulk or self._running_tokens >= _MOST_WINDOWS * window:
            return False
        is_below_share = self._beyond_share(turn) < 0
        return self._running_of[turn.tenant] < (window if is_below_share else self._share(turn) * window)

    def _share(self, turn: Turn) -> float:
        """Its tenant's part of all weights."""
        return turn.weight / sum(self._weights.values())

    def _beyond_share(self, turn: Turn) -> float:
        """How many tokens its tenant ran of late beyond its share of what all ran."""
        return self._used_of.get(turn.tenant, 0.0) - self._share(turn) * sum(self._used_of.values())

    def _leave_queue(self, turn: Turn) -> None:
        waiting = self._waiting[turn.is_bulk]
        del waiting[turn.tenant][turn]
        if not waiting[turn.tenant]:
            del waiting[turn.tenant]

    def _forget(self, tenant: str) -> None:
        """Drops what is known of a tenant that has nothing running or waiting."""
        if not self._running_of[tenant]:
            del self._running_of[tenant]
            if not any(tenant in waiting for waiting in self._waiting):
                self._weights.pop(tenant, None)

    def _pass_time(self) -> None:
        now_s = self._clock()
        if now_s - self._faded_s >= _FADE_EVERY_S:
            passed_s, self._faded_s = now_s - self._faded_s, now_s
            left = math.exp(-passed_s / _MEMORY_S)
            self._used_of = {tenant: used * left for tenant, used in self._used_of.items() if used * left >= 1}
            self._best_rate *= math.exp(-passed_s / _RATE_MEMORY_S)
        if self._running:
            passed_s = now_s - self._at_s
            kept = math.exp(-passed_s / _RATE_WINDOW_S)
            self._answered_tokens *= kept
            self._busy_s = self._busy_s * kept + passed_s
        self._at_s = now_s


def _is_waiting(turn: Turn) -> bool:
    return turn.future is not None and not turn.future.done()
