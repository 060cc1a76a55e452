"""One timer for all deadlines of an event loop, since hardly any of them passes."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

# The least time between two looks at all deadlines, and so the most by which one may be late. A timer for each costs
# 1.5 µs more (2026-11-25, uvloop 0.23).
_TICK_S = 0.01


class Deadlines:
    """Calls back what has passed its deadline."""

    def __init__(self) -> None:
        self._pending: dict[object, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = 0.0

    def add(self, key: object, deadline_s: float, expire: Callable[[], None]) -> None:
        """Calls `expire` once `deadline_s` has passed, unless `key` is removed before."""
        self._pending[key] = deadline_s, expire
        if self._timer is None or deadline_s < self._look_at_s:
            self._set_timer(deadline_s)

    def remove(self, key: object) -> None:
        """Forgets a deadline, also one that has passed."""
        self._pending.pop(key, None)

    def _set_timer(self, at_s: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._look_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic() + 0.0005  # uvloop's timers may be early by half a millisecond
        for key, (deadline_s, expire) in list(self._pending.items()):
            if deadline_s <= now_s and self._pending.pop(key, None) is not None:
                expire()
        if self._pending:
            self._set_timer(max(min(deadline_s for deadline_s, _ in self._pending.values()), now_s + _TICK_S))


class Late(TimeoutError):
    """The deadline of a Timeout has passed."""


class Timeout:
    """Cancels the block of a task at a deadline, as asyncio.timeout does: the block then raises Late."""

    __slots__ = ("_cancelling", "_deadline_s", "_deadlines", "_is_expired", "_task")

    def __init__(self, deadlines: Deadlines, deadline_s: float | None) -> None:
        self._deadlines = deadlines
        self._deadline_s = deadline_s
        self._is_expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a timeout needs a task")
        self._task, self._cancelling = task, task.cancelling()
        if self._deadline_s is not None:
            # A task that runs cannot be cancelled and go on after uncancel (before Python 3.13).
            if self._deadline_s <= time.monotonic():
                self._is_expired = True
                raise Late
            self._deadlines.add(self, self._deadline_s, self.expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        task = self._task
        del self._task  # a cancelled task keeps its frames, one of which has this
        if self._is_expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Late from error

    def expire(self) -> None:
        """Ends the block now. Not for its own task to call."""
        if not self._is_expired:
            self._is_expired = True
            self._deadlines.remove(self)
            self._task.cancel()
