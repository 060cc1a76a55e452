"""What several folders of unit tests need of the process that they run in."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from tests.suite.fixed_clock import FixedClock


@pytest.fixture
def clock() -> FixedClock:
    return FixedClock()


@pytest.fixture
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("NEURONPIPE_"):
            monkeypatch.delenv(name)


@pytest.fixture
async def own_signals() -> AsyncIterator[None]:
    """A served process has the signals until it ends, which this one does not."""
    yield
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
