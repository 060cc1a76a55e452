import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.coalescer import System, Wire


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System()
    yield system
    for task in system.tasks:
        task.cancel()
    await asyncio.gather(*system.tasks, return_exceptions=True)


@pytest.fixture
async def wire(system: System) -> Wire:
    """An endpoint that says nothing of its models."""
    return await system.connect()
