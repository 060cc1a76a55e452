"""Waiting for what happens, and not for a time: on a busy machine, everything takes longer.

Only a broken test waits for as long as it may.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

LIMIT_S = 60.0
# The pauses between two looks. The first pause suits events in this process, the longest suits a service.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


def until(is_so: Callable[[], bool], what: str = "") -> None:
    """Waits until something is so. A refused connection counts as not yet so."""
    ends_s, pause_s = time.monotonic() + LIMIT_S, _FIRST_PAUSE_S
    while True:
        with suppress(ConnectionError):
            if is_so():
                return
        assert time.monotonic() < ends_s, f"it did not happen in time: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def happens(is_so: Callable[[], object]) -> None:
    """Waits for the same without blocking the event loop."""
    pause_s = _FIRST_PAUSE_S
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = is_so()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def settled() -> None:
    """Lets every task go as far as it can without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits until all have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
