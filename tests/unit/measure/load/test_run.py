"""run.py: how a run is split among processes. What they do together is in tests/integration/commands/test_load.py."""

import pytest

from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.run import load_parts


def test_callers_are_split_evenly_and_none_is_lost() -> None:
    found = load_parts(LoadRequest(target="h:1", model="m", concurrency=8, processes=3))
    assert [load.callers for load in found] == [3, 3, 2]


def test_rate_is_split_evenly_with_a_seed_for_each_process() -> None:
    found = load_parts(LoadRequest(target="h:1", model="m", rate_per_s=90.0, processes=3, seed=7))
    assert [load.rate_per_s for load in found] == [30.0] * 3
    assert len({tuple(load.seed) for load in found}) == 3
    assert sum(load.max_in_flight for load in found) <= 10_000


@pytest.mark.parametrize(("deadline_ms", "drain_s"), [(None, 30.0), (500.0, 1.5), (60_000.0, 30.0)])
def test_the_wait_at_the_end_is_bounded_by_the_deadline(deadline_ms: float | None, drain_s: float) -> None:
    (load,) = load_parts(LoadRequest(target="h:1", model="m", deadline_ms=deadline_ms))
    assert load.drain_s == drain_s
