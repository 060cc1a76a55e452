"""The clock of the event loop, which tests move forward: timers run early, and nothing waits."""

import asyncio

import pytest

from tests.suite.waiting import settled


class LoopClock:
    """The clock of the running event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        time, self._ahead_s = loop.time, 0
        monkeypatch.setattr(loop, "time", lambda: time() + self._ahead_s)

    async def jump(self, seconds: int) -> None:
        """Moves the clock at once, as a standstill of the process does, and runs the timers that are due."""
        self._ahead_s += seconds
        await settled()

    async def run(self, seconds: int) -> None:
        """Lets time pass as in a process that runs, so that timers are in time."""
        for _ in range(seconds):
            await self.jump(1)
