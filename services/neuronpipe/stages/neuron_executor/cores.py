"""Records the work of each core of a device: the batch that it computes, the batches that wait, and its loss.

A core hangs if the batch that it computes does not end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from neuronpipe.platform.process.running_time import RunningTime
from neuronpipe.stages.neuron_executor.backends.base import CoreLost


class CoresLost(Exception):
    """No core of a device is left. The process must end."""


class Cores:
    """Records the batches of all models on each core.

    A core computes one batch at a time, and a batch that it got ahead waits for the batch before. So the time of a
    batch counts from the moment when the core is free for it, and the times of a core's batches never overlap.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # Time of the first loss; None while no core is lost.
        self.lost_s: float | None = None
        # The number of batches on all cores.
        self.running = 0
        self._lost: set[int] = set()
        # For each core the expected times and the owners of its batches, and the time when it began the first of them.
        self._given: list[deque[tuple[float, object]]] = [deque() for _ in range(count)]
        self._since_ns = [0] * count
        # Cores with a batch that may have caused the loss of a core. They get no other batch until it ends.
        self._kept_apart: set[int] = set()

    @property
    def left(self) -> int:
        return self.count - len(self._lost)

    @property
    def idle(self) -> int:
        return sum(not batches and core not in self._lost for core, batches in enumerate(self._given))

    def is_lost(self, core: int) -> bool:
        return core in self._lost

    def is_idle(self, core: int) -> bool:
        return not self._given[core]

    def may_take(self, core: int) -> bool:
        """Returns whether a core may take a batch. A busy core takes a batch ahead only while no core is idle."""
        return self.is_idle(core) or (core not in self._kept_apart and not self.idle)

    def busy_with_others_s(self, owner: object) -> float:
        """Estimates the time until the first core has no work of other owners."""
        return min((self.busy_s(core, owner) for core in range(self.count) if core not in self._lost), default=0.0)

    def busy_s(self, core: int, except_for: object = None) -> float:
        """Estimates the time until a core has computed its batches, and begins the next batch.

        `except_for`: the batches of this owner do not count.
        """
        batches = self._given[core]
        if not batches:
            return 0.0
        expected_s = sum(batch_s for batch_s, owner in batches if owner is not except_for)
        passed_s = (time.monotonic_ns() - self._since_ns[core]) / 1e9 if batches[0][1] is not except_for else 0.0
        return max(0.0, expected_s - passed_s)

    def begin_batch(self, core: int, expected_s: float, owner: object = "", *, is_kept_apart: bool = False) -> None:
        """Records a batch that a core was given, with its owner (a model's forecast) and its expected time."""
        if self.is_idle(core):
            self._since_ns[core] = time.monotonic_ns()
        self._given[core].append((expected_s, owner))
        self.running += 1
        if is_kept_apart:
            self._kept_apart.add(core)

    def end_batch(self, core: int) -> tuple[int, int]:
        """Records that a batch ended or failed. Returns the times of its begin and its end on time.monotonic_ns()."""
        since_ns, self._since_ns[core] = self._since_ns[core], time.monotonic_ns()
        self._given[core].popleft()
        self.running -= 1
        self._kept_apart.discard(core)
        return since_ns, self._since_ns[core]

    def lose(self, core: int) -> bool:
        """Records the loss of a core. Returns False for a core that was lost before."""
        is_new = core not in self._lost
        self._lost.add(core)
        self.lost_s = self.lost_s or time.monotonic()
        return is_new


class CoreWatchdog:
    """Watches one core. The time of a batch begins when the core has computed the batches before it."""

    def __init__(self, give_up: Callable[[str, CoreLost], None]) -> None:
        """`give_up`: called with the model of a batch that hangs, before the tasks of all batches of the core are
        cancelled.
        """
        self._give_up = give_up
        # The model and the time limit of each batch, by the task that waits for it, oldest first.
        self._batches: dict[asyncio.Task[Any], tuple[str, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        # The task whose batch hangs.
        self._hung: asyncio.Task[Any] | None = None

    def begin_batch(self, model_name: str, limit_s: float) -> None:
        """Records that the current task gives a batch to the core."""
        self._batches[_current_task()] = model_name, limit_s
        if len(self._batches) == 1:
            self._start()

    def end_batch(self) -> None:
        """Records that the batch of the current task has ended."""
        task = _current_task()
        is_first = next(iter(self._batches)) is task
        del self._batches[task]
        if is_first and self._timer:
            self._timer.cancel()
            self._start()

    def end_cancellation(self) -> CoreLost | None:
        """Takes back the cancellation of the current task, and returns why its batch is given up.

        Returns None for a task that another cause has cancelled, which must end.
        """
        if self._hung is None:
            return None
        task = _current_task()
        task.uncancel()
        return CoreLost("the core hangs", has_begun=task is self._hung)

    def _start(self) -> None:
        """Begins the time of the oldest batch."""
        if self._batches:
            self._look(RunningTime(next(iter(self._batches.values()))[1]))

    def _look(self, batch_time: RunningTime) -> None:
        loop, (task, (model_name, limit_s)) = asyncio.get_running_loop(), next(iter(self._batches.items()))
        if batch_time.look(task, loop.time()) < limit_s:
            self._timer = loop.call_later(batch_time.look_s, self._look, batch_time)
            return
        self._hung = task
        self._give_up(model_name, CoreLost(f"a batch did not end within {limit_s:g} s"))
        for task in self._batches:
            task.cancel()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task  # noqa: S101
    return task
