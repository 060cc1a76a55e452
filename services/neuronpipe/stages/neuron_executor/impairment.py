"""The faults of an executor that only its replacement mends: lost cores, and calls of back ends that do not end.

A back end may hang while it loads or frees a model, because of its device or driver. The executor then abandons the
thread and loads other models, which cannot use the resources of the thread. Health reports this after a limit.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.process.background import start_apart
from neuronpipe.stages.neuron_executor.cores import Cores

ResultT = TypeVar("ResultT")

_LOOK_EVERY_S = 0.5


class Impairment:
    """The lost cores and hanging calls of a process. `limit_s`: time after which they count; 0: never."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._cores: list[Cores] = []
        # The time at which each call began, and its description.
        self._calls: dict[Future[Any], tuple[float, str]] = {}

    def watch(self, cores: Cores) -> None:
        self._cores.append(cores)

    async def call(self, action: str, function: Callable[[], ResultT], limit_s: float | None = None) -> ResultT:
        """Calls a back end in a thread. Raises SetupError after `limit_s` (None: the process's limit)."""
        limit_s, setting = (self._limit_s, " (--impaired-limit-s)") if limit_s is None else (limit_s, "")
        call = start_apart(function)
        self._calls[call] = time.monotonic(), action
        try:
            async with asyncio.timeout(limit_s or None) as limit:
                return await asyncio.wrap_future(call)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise SetupError(f"{action} has not ended after {limit_s:g} s, the limit{setting}") from error
        finally:
            if call.done():
                self._calls.pop(call, None)

    @property
    def problem(self) -> str:
        """The fault that has lasted longer than the limit; empty if there is none."""
        before_s = time.monotonic() - self._limit_s
        self._calls = {call: entry for call, entry in self._calls.items() if not call.done()}
        for cores in self._cores:
            if cores.lost_s is not None and cores.lost_s < before_s:
                return f"{cores.count - cores.left} of {cores.count} cores are lost"
        return next((action for began_s, action in self._calls.values() if began_s < before_s), "")

    async def report_changes(self, report: Callable[[bool], None]) -> None:
        """Reports whether the process is well, at each change, until it is cancelled."""
        reported = ""
        while self._limit_s:
            if (problem := self.problem) != reported:
                report(not problem)
                reported = problem
                log_warning("impaired; health is NOT_SERVING" if problem else "not impaired any more", problem=problem)
            await asyncio.sleep(_LOOK_EVERY_S)
