"""Waiting for what another task or process does."""

import asyncio
from collections.abc import Callable

# Only a broken test waits this long.
_PATIENCE_S = 20.0


async def soon(is_true: Callable[[], bool]) -> None:
    """Waits until it is true."""
    async with asyncio.timeout(_PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.005)
