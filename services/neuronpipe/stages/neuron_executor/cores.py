"""Records the work of each core of a device: the batch that it computes, those behind it, and whether it is lost.

A core hangs when the batch that it computes does not end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuronpipe.stages.neuron_executor.backends.base import CoreLost


class CoresLost(Exception):
    """No core of a device is left. The process has to end."""


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that a core was given, of any model, and its expected time."""

    expected_s: float
    owner: object


class Cores:
    """Records the batches on each core, of all models.

    A core computes one batch at a time; a batch that it is given ahead waits for the one before. So a batch's time
    counts from when the core was free for it, and the times of a core's batches never overlap.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lost: set[int] = set()
        # For each core: its batches, and when it began the first of them.
        self._handed: list[deque[_Handed]] = [deque() for _ in range(count)]
        self._since_ns = [0] * count
        # Cores that run a batch that may have caused the loss of a core. They get no other work meanwhile.
        self._kept_apart: set[int] = set()

    @property
    def left(self) -> int:
        """The number of cores that are not lost."""
        return self.count - len(self._lost)

    @property
    def idle(self) -> int:
        """The number of cores without work."""
        return sum(not batches and core not in self._lost for core, batches in enumerate(self._handed))

    @property
    def running(self) -> int:
        """The number of batches on all cores."""
        return sum(map(len, self._handed))

    def is_lost(self, core: int) -> bool:
        """Whether a core is lost."""
        return core in self._lost

    def is_idle(self, core: int) -> bool:
        """Whether a core has no work."""
        return not self._handed[core]

    def may_take(self, core: int) -> bool:
        """Whether a core may take a batch. A busy core takes one ahead only if no idle core could begin it now."""
        return self.is_idle(core) or (core not in self._kept_apart and not self.idle)

    def busy_s(self, core: int) -> float:
        """The expected time that a core needs for its batches. The next batch waits for it."""
        return self._busy_s(core, None)

    def busy_with_others_s(self, owner: object) -> float:
        """The expected time until a core has no work of owners other than this one."""
        return min((self._busy_s(core, owner) for core in range(self.count) if core not in self._lost), default=0.0)

    def _busy_s(self, core: int, but: object) -> float:
        batches = self._handed[core]
        if not batches:
            return 0.0
        expected_s = sum(one.expected_s for one in batches if one.owner is not but)
        passed_s = (time.monotonic_ns() - self._since_ns[core]) / 1e9 if batches[0].owner is not but else 0.0
        return max(0.0, expected_s - passed_s)

    def begin(self, core: int, expected_s: float, owner: object = "", *, is_kept_apart: bool = False) -> None:
        """Records a batch that a core is given, with its owner (a model's forecast) and its expected time."""
        if self.is_idle(core):
            self._since_ns[core] = time.monotonic_ns()
        self._handed[core].append(_Handed(expected_s, owner))
        if is_kept_apart:
            self._kept_apart.add(core)

    def end(self, core: int) -> tuple[int, int]:
        """Records that a batch has ended or failed. Returns when the core began it, and now, on time.monotonic_ns()."""
        since_ns, self._since_ns[core] = self._since_ns[core], time.monotonic_ns()
        self._handed[core].popleft()
        self._kept_apart.discard(core)
        return since_ns, self._since_ns[core]

    def lose(self, core: int) -> bool:
        """Records a lost core. Returns whether it was not lost before."""
        is_news = core not in self._lost
        self._lost.add(core)
        return is_news


@dataclass(frozen=True, slots=True)
class _Watched:
    """A batch of a core, and its time limit."""

    model_name: str
    limit_s: float


class CoreWatchdog:
    """Watches one core. A batch's time begins when those before it have ended: a core computes one at a time."""

    def __init__(self, give_up: Callable[[str, CoreLost], None]) -> None:
        """`give_up` is called with the model of a batch that hangs.

        Then the tasks of all of the core's batches are cancelled.
        """
        self._give_up = give_up
        # By the task that waits for the batch, oldest first.
        self._batches: dict[asyncio.Task[Any], _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        # The task whose batch hangs.
        self.hung: asyncio.Task[Any] | None = None

    def begin(self, model_name: str, limit_s: float) -> None:
        """The current task gives a batch to the core."""
        self._batches[_current_task()] = _Watched(model_name, limit_s)
        if len(self._batches) == 1:
            self._start()

    def end(self) -> None:
        """The current task's batch has ended."""
        task = _current_task()
        is_first = next(iter(self._batches)) is task
        del self._batches[task]
        if is_first and self._timer:
            self._timer.cancel()
            self._start()

    def _start(self) -> None:
        if self._batches:
            limit_s = next(iter(self._batches.values())).limit_s
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._bark)

    def _bark(self) -> None:
        self.hung, first = next(iter(self._batches.items()))
        self._give_up(first.model_name, CoreLost(f"a batch did not end within {first.limit_s:g} s"))
        for task in self._batches:
            task.cancel()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task  # noqa: S101
    return task
