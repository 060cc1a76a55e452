import pytest

from tests.unit.stages.neuron_executor.scheduling import FixedClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FixedClock:
    """The clock of the scheduler and of its parts."""
    return FixedClock.installed(monkeypatch)
