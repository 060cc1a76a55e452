"""Two minutes of a day in production: see tests/day."""

import os

import pytest

from tests.day.run import live

# Its events and texts are always the same ones; `make day` draws others.
_SEED = 3


@pytest.mark.local_only
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_a_day_in_production_loses_only_what_a_killed_process_had() -> None:
    day = await live(float(os.environ.get("NEURONPIPE_DAY_S", "120")), _SEED)
    assert day.faults == {}
    # It was a day: every kind of call was answered, and a part of the system was killed.
    assert len({call.door for call in day.calls if not call.problem}) == 10
    assert day.timeline.kills
    assert day.jobs > 0
