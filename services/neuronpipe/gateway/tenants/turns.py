"""The order of the requests of a model, where several tenants want more than the model can compute.

A window says how many tokens of a model run at once: about what it computes in `window_s`. Further requests wait for
their tenant's turn. The tenant that ran the least for its weight in the last seconds is next. So that it need not wait
for what others have borrowed, a tenant that is below its share runs beside them.
"""

import asyncio
import math
import time
from collections.abc import Callable

# A request costs these beside its own: the services compute for it as long as a model for 32 tokens. Else a tenant of
# many tiny requests would have nearly all of their time.
REQUEST_TOKENS = 32
# This many requests may always run: one is computed while the next one is on its way.
_MIN_RUNNING = 2
# The least window of a model, in quickest answers, or the batches of a slow model would be too small.
_QUICKEST_ANSWERS = 3
# The time over which the rate is an average, in seconds in which something ran.
_RATE_WINDOW_S = 0.5
# Tenants below their shares run beside others while at most this many windows are full.
_MOST_WINDOWS = 2
# The time over which the best rate fades.
_RATE_MEMORY_S = 60.0
# The time over which it counts what a tenant ran, in seconds, and how often that fades.
_MEMORY_S, _FADE_EVERY_S = 5.0, 0.1


class Turn:
    """A request that runs, or waits to. `tokens`: what runs at once, of its input and `REQUEST_TOKENS`; what it
    generates counts for its tenant's share only.
    """

    __slots__ = ("began_s", "future", "is_beyond_share", "is_bulk", "is_paused", "tenant", "tokens", "turns", "weight")

    def __init__(self, tenant: str, weight: float, tokens: int, *, is_bulk: bool) -> None:
        self.tenant = tenant
        self.weight = weight
        self.tokens = max(1, tokens)
        self.is_bulk = is_bulk
        self.began_s = 0.0
        # Known when it begins to run.
        self.is_beyond_share = False
        self.is_paused = False
        self.future: asyncio.Future[None] | None = None
        self.turns: Turns  # of the model, once the request has asked for its turn

    def charge(self, tokens: int) -> None:
        """Adds tokens, which may be negative, to the cost of the request for its tenant's share."""
        self.turns.charge(self, tokens)

    def pause(self, *, is_paused: bool) -> None:
        """Lets others run while the request waits for something that is not the model, or ends that."""
        self.turns.pause(self, is_paused=is_paused)

    def resize(self, more: int) -> None:
        """Corrects the tokens of the request's input by `more`, which may be negative."""
        self.turns.resize(self, more)


class _Share:
    """What one tenant has of a model. `used_tokens`: what it ran of late, which fades. `turns`: how many run or wait.
    `waiting`: interactive requests and bulk ones, in the order of arrival.
    """

    __slots__ = ("running_tokens", "turns", "used_tokens", "waiting", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.turns = self.running_tokens = 0
        self.used_tokens = 0.0
        self.waiting: tuple[dict[Turn, None], dict[Turn, None]] = {}, {}


class Turns:
    """The turns of one model."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        # A paused request is no part of the window, but the model may be busy with it.
        self._running = self._paused = 0
        self._running_tokens = 0
        # The tenants with requests that run, wait, or ran of late.
        self._shares: dict[str, _Share] = {}
        self._waiting = 0
        # Of all of them: the weights of those that have something running or waiting, and what ran of late.
        self._weights = self._used_tokens = 0.0
        # Tokens that were answered, and the time in which something ran; both fade.
        self._answered_tokens = self._busy_s = 0.0
        # The best of late of one by the other, as a model that has little to do shows less than it can.
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
        turn.turns = self
        share = self._shares.get(turn.tenant) or self._shares.setdefault(turn.tenant, _Share())
        if share.turns:
            self._weights -= share.weight
        share.turns += 1
        share.weight = turn.weight
        self._weights += turn.weight
        queue = share.waiting[turn.is_bulk]
        if not queue and self._may_run(turn, is_next=not self._waiting):
            self._run(turn)
            return
        queue[turn] = None
        self._waiting += 1
        turn.future = asyncio.get_running_loop().create_future()
        try:
            await turn.future
        except asyncio.CancelledError:
            if turn.future.cancelled():
                self._leave_queue(turn)
                self._end_turn(share)
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
        if turn.is_paused:
            self._paused -= 1
        else:
            self._count(turn, -1)
        self._end_turn(self._shares[turn.tenant])
        self._run_next()

    def pause(self, turn: Turn, *, is_paused: bool) -> None:
        """A request that runs waits for something that is not the model, so that others may run, or no longer."""
        if turn.is_paused != is_paused:
            self._pass_time()
            turn.is_paused = is_paused
            self._paused += 1 if is_paused else -1
            self._count(turn, -1 if is_paused else 1)
            self._run_next()

    def charge(self, turn: Turn, tokens: int) -> None:
        """Adds tokens, which may be negative, to the cost of a request that runs."""
        if share := self._shares.get(turn.tenant):
            share.used_tokens += tokens
            self._used_tokens += tokens

    def resize(self, turn: Turn, more: int) -> None:
        """A request that runs turns out to have `more` tokens than was thought, or fewer where it is negative."""
        turn.tokens += more
        if not turn.is_paused:
            self._running_tokens += more
            self._shares[turn.tenant].running_tokens += more
        self.charge(turn, more)

    def _run(self, turn: Turn) -> None:
        self._pass_time()
        turn.began_s = self._at_s
        turn.is_beyond_share = self._beyond_share(turn) > 0
        self._count(turn, 1)
        self.charge(turn, turn.tokens)
        if turn.future:
            turn.future.set_result(None)

    def _count(self, turn: Turn, times: int) -> None:
        """Adds a request to what runs, or takes it out (-1)."""
        self._running += times
        self._running_tokens += times * turn.tokens
        self._shares[turn.tenant].running_tokens += times * turn.tokens

    def _run_next(self) -> None:
        while turn := self._next():
            self._leave_queue(turn)
            self._run(turn)

    def _leave_queue(self, turn: Turn) -> None:
        del self._shares[turn.tenant].waiting[turn.is_bulk][turn]
        self._waiting -= 1

    def _end_turn(self, share: _Share) -> None:
        share.turns -= 1
        if not share.turns:
            self._weights -= share.weight

    def _next(self) -> Turn | None:
        """The turn that is next, where it may run now."""
        for is_bulk in (False, True):
            # A request that was cancelled stays in its queue until its task runs.
            firsts = [
                (share.used_tokens / share.weight, turn)
                for share in self._shares.values()
                if (turn := next((one for one in share.waiting[is_bulk] if _is_waiting(one)), None))
            ]
            if firsts:
                _, turn = min(firsts, key=lambda one: one[0])
                return turn if self._may_run(turn, is_next=True) else None
        return None

    def _may_run(self, turn: Turn, *, is_next: bool) -> bool:
        window = self.window_tokens
        if is_next and (self._running < _MIN_RUNNING or self._running_tokens < window):
            return True
        if turn.is_bulk or self._running_tokens >= _MOST_WINDOWS * window:
            return False
        is_below_share = self._beyond_share(turn) < 0
        running = self._shares[turn.tenant].running_tokens
        return running < (window if is_below_share else self._share(turn) * window)

    def _share(self, turn: Turn) -> float:
        """Its tenant's part of all weights."""
        return turn.weight / self._weights

    def _beyond_share(self, turn: Turn) -> float:
        """The tokens that the tenant ran of late beyond its share of the tokens of all."""
        return self._shares[turn.tenant].used_tokens - self._share(turn) * self._used_tokens

    def _pass_time(self) -> None:
        now_s = self._clock()
        if now_s - self._faded_s >= _FADE_EVERY_S:
            passed_s, self._faded_s = now_s - self._faded_s, now_s
            left = math.exp(-passed_s / _MEMORY_S)
            for share in self._shares.values():
                share.used_tokens *= left
            self._shares = {name: one for name, one in self._shares.items() if one.turns or one.used_tokens >= 1}
            self._used_tokens = sum(one.used_tokens for one in self._shares.values())
            self._weights = sum(one.weight for one in self._shares.values() if one.turns)
            self._best_rate *= math.exp(-passed_s / _RATE_MEMORY_S)
        if self._running or self._paused:
            passed_s = now_s - self._at_s
            kept = math.exp(-passed_s / _RATE_WINDOW_S)
            self._answered_tokens *= kept
            self._busy_s = self._busy_s * kept + passed_s
        self._at_s = now_s


def _is_waiting(turn: Turn) -> bool:
    return turn.future is not None and not turn.future.done()
