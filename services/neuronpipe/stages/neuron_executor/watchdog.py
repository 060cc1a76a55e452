"""Detects cores that hang, which is when the batch that a core computes does not end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuronpipe.stages.neuron_executor.backends.base import CoreLost


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
