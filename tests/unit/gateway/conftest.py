from collections.abc import AsyncIterator

import pytest

from tests.suite.waiting import cancelled
from tests.unit.gateway.coalescer import System, Wire


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System()
    yield system
    await cancelled(*system.tasks)


@pytest.fixture
async def wire(system: System) -> Wire:
    """An endpoint that says nothing of its models."""
    return await system.connect()
