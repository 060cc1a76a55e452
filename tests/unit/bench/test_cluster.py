"""tests/bench/cluster: the simulation does what arithmetic says where arithmetic can say it."""

import math
from itertools import pairwise

import pytest

from tests.bench.cluster.executors import Device
from tests.bench.cluster.scenarios import FIXED, Scenario, run

# A request takes 50 ms, alone: 20 a second.
_ONE = Device(cores=1, overhead_s=0.05, token_s=0.0, tokens=0.0, max_batch=1)


def _steady(rate: float, seconds: float, bounds: tuple[int, int], start_s: float = 0) -> Scenario:
    return Scenario("steady", "", seconds, lambda now_s: rate, bounds, start_s)


def test_an_executor_answers_what_it_can_compute_and_the_rest_is_shed() -> None:
    # The queue's forecast is 0 without a cost of tokens, so requests are dropped when their turn comes too late.
    found = run(_steady(40, 100, (1, 1)), FIXED, _ONE)
    assert found.shed_share == pytest.approx(0.5, abs=0.03)
    assert found.p99_s == pytest.approx(1.0, abs=0.06)


def test_a_queue_is_as_long_as_theory_says() -> None:
    # M/D/1 at half the capacity: half of the arrivals find it idle. 0.3 ms more for the bins, and arrivals every 20 ms.
    found = run(_steady(10, 400, (1, 1)), FIXED, _ONE)
    assert found.p50_s == pytest.approx(0.05, abs=0.012)
    assert found.shed_share == 0


def test_cpu_settles_at_the_number_for_its_target() -> None:
    # 140 requests a second are 7 executors that compute all the time, and 10 at 70 %.
    found = run(_steady(140, 300, (2, 40), 10), "CPU 70 %", _ONE)
    last = [size for at_s, size in found.sizes if at_s > 200]
    assert all(abs(size - 10) <= 1 for size in last)


def test_down_goes_a_fifth_a_minute_after_five_minutes() -> None:
    def rate_at(now_s: float) -> float:
        return 70 if now_s < 150 else 7

    found = run(Scenario("drop", "", 650, rate_at, (2, 40), 10), "CPU 70 %", _ONE)
    # What asked for as many was last seen at 150 s or soon after.
    before = [size for at_s, size in found.sizes if 100 < at_s < 150]
    assert min(size for at_s, size in found.sizes if 150 < at_s < 430) >= min(before)
    for (_, size), (_, following) in pairwise(found.sizes):
        assert following >= math.floor(size * 0.8)
    assert found.sizes[-1][1] < min(before)


def test_a_queue_tells_by_how_much_there_are_too_few_and_a_busy_cpu_does_not() -> None:
    # At six times what they can compute, eight that are busy ask for 8 / 0.7; up goes to twice as many at most.
    crowd = _steady(8 * 6 * Device().requests_per_s, 24, (8, 40), 10)
    assert run(crowd, "CPU 70 %").sizes[-1][1] == 12
    assert run(crowd, "queue 0.2 s").sizes[-1][1] == 16
