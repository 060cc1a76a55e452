"""gateway/tenants/tenants.py: tokens a minute."""

import pytest

from neuronpipe.gateway.tenants.tenants import TokenBucket
from tests.suite.fixed_clock import FixedClock


def test_a_minutes_tokens_are_there_at_once(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    assert bucket.wait_s(600) == 0
    bucket.take(600)
    assert bucket.level == 0


def test_tokens_come_back_evenly(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)  # ten a second
    bucket.take(600)
    assert bucket.wait_s(50) == 5
    clock.now_s += 3
    assert bucket.wait_s(50) == 2
    clock.now_s += 2
    assert bucket.wait_s(50) == 0


def test_no_more_than_a_minutes_tokens_pile_up(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    clock.now_s += 3600
    assert bucket.level == 600


def test_a_debt_is_paid_before_anything_else(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    bucket.take(700)
    assert bucket.level == -100
    assert bucket.wait_s(1) == pytest.approx(10.1)


def test_a_debt_is_kept_whole(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    bucket.take(12_600)
    clock.now_s += 19 * 60
    assert bucket.level == -600
    assert bucket.wait_s(1) == pytest.approx(60.1)


def test_a_request_larger_than_a_minutes_tokens_waits_for_a_full_bucket(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    assert bucket.wait_s(5000) == 0
    bucket.take(300)
    assert bucket.wait_s(5000) == 30


def test_tokens_are_put_back(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    bucket.take(100)
    bucket.take(-100)
    assert bucket.level == 600
    assert bucket.taken == 0


def test_a_share_has_its_part_of_level_and_rate(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    bucket.share = 0.25
    assert bucket.level == 150
    bucket.take(150)
    clock.now_s += 2  # two and a half a second
    assert bucket.level == 5


def test_a_changed_capacity_counts_at_once(clock: FixedClock) -> None:
    bucket = TokenBucket(600, clock)
    bucket.capacity = 60
    assert bucket.level == 60
