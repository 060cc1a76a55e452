"""Deadlines and held time of requests. All deadlines share one timer, because hardly any deadline passes."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

# Minimum time between two checks of all deadlines, and so the maximum delay of an expiry. A timer for each
# deadline costs 1.5 µs more (2026-11-25, uvloop 0.23). The check of thousands of deadlines takes longer: then the time
# between two checks is this multiple of the last check.
_TICK_S, _TICK_CHECKS = 0.01, 20
# Time for which a caller is still read before the caller is said to be late. uvloop runs timers before it reads: after
# a process has stood still, the caller's bytes would come too late.
LAST_LOOK_S = 0.01


class Deadlines:
    """Calls a function for each entry whose deadline has passed.

    `last_look_s`: the time for which the event loop still reads before an entry expires; LAST_LOOK_S where a caller
    must act before the deadline, otherwise 0.
    """

    def __init__(self, last_look_s: float = 0.0) -> None:
        self._pending: dict[object, tuple[float, Callable[..., None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = math.inf
        self._last_look_s = last_look_s

    def add(self, key: object, deadline_s: float, expire: Callable[..., None]) -> None:
        """Calls `expire` once `deadline_s` has passed, unless `key` is removed before."""
        self._pending[key] = deadline_s, expire
        if deadline_s < self._look_at_s:
            self._set_timer(deadline_s)

    def remove(self, key: object) -> None:
        """Removes a deadline, also after it has passed."""
        self._pending.pop(key, None)

    def _set_timer(self, at_s: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._look_at_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - time.monotonic()), self._look)

    def _look(self) -> None:
        now_s = time.monotonic() + 0.0005  # uvloop's timers may be early by half a millisecond
        if self._last_look_s:
            self._timer = asyncio.get_running_loop().call_later(self._last_look_s, self._end_due, now_s)
        else:
            self._end_due(now_s)

    def _end_due(self, due_s: float) -> None:
        """Ends the entries whose deadline was not after `due_s`."""
        began_s = time.monotonic()
        self._timer, self._look_at_s = None, math.inf
        for key, entry in list(self._pending.items()):
            if entry[0] <= due_s and self._pending.get(key) is entry:
                del self._pending[key]
                self._end(entry[1])
        if self._pending:
            now_s = time.monotonic()
            earliest_s = min(deadline_s for deadline_s, _ in self._pending.values())
            self._set_timer(max(earliest_s, now_s + max(_TICK_S, _TICK_CHECKS * (now_s - began_s))))

    def _end(self, expire: Callable[..., None]) -> None:
        expire()


class Late(TimeoutError):
    """The deadline of a Timeout has passed."""


class Timeout:
    """Cancels the block of a task at a deadline, as asyncio.timeout does: the block then raises `late()`."""

    __slots__ = ("_cancelling", "_deadline_s", "_deadlines", "_is_expired", "_late", "_task")

    def __init__(
        self, deadlines: Deadlines, deadline_s: float | None, late: Callable[[], BaseException] = Late
    ) -> None:
        self._deadlines = deadlines
        self._deadline_s = deadline_s
        self._late = late
        self._is_expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a timeout needs a task")
        self._task, self._cancelling = task, task.cancelling()
        if self._deadline_s is not None:
            # Before Python 3.13, a task that cancels itself stays cancelled after uncancel, so this raises at once.
            if self._deadline_s <= time.monotonic():
                self._is_expired = True
                raise self._error()
            self._deadlines.add(self, self._deadline_s, self.expire)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._deadlines.remove(self)
        task = self._task
        del self._task  # a cancelled task keeps its frames, one of which holds this object
        if self._is_expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error() from error
        self._late = Late

    def _error(self) -> BaseException:
        late, self._late = self._late, Late  # the function may belong to an object that holds this timeout
        return late()

    def expire(self) -> None:
        """Ends the block now. The block's own task must not call it."""
        if not self._is_expired:
            self._is_expired = True
            self._deadlines.remove(self)
            self._task.cancel()


@dataclass(slots=True)
class HeldTime:
    """The time for which the gateway held a request's items, each moment counted once. `items`: the number of items
    that are held now. `service`: the stage for which the items are held, or were held when the request ended; empty
    once the items are sent.
    """

    total_ns: int = 0
    service: str = ""
    counted_until_ns: int = 0
    items: int = 0

    def add(self, began_ns: int, ended_ns: int) -> None:
        """Adds a time in which one of the request's items was held."""
        self.total_ns += max(0, ended_ns - max(began_ns, self.counted_until_ns))
        self.counted_until_ns = max(ended_ns, self.counted_until_ns)
