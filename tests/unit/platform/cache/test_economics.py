"""platform/cache/economics.py: Redis is asked where that saves time."""

import random

import pytest

from neuronpipe.platform.cache.economics import LookupEconomics, RunningQuantile

# As measured on the loopback: 0.2 ms for a look-up, 10 µs for each of its values; storing one takes three times as
# long.
_LOOKUP_S, _LOOKUP_VALUE_S = 200e-6, 10e-6
_SHORT, _SHORT_S = 150, 60e-6
_LONG, _LONG_S = 1500, 600e-6


def _worth(*, hits: float = 0.9) -> LookupEconomics:
    worth = LookupEconomics()
    for _ in range(400):
        worth.looked_up(1, _LOOKUP_S)
        worth.looked_up(32, _LOOKUP_S + 32 * _LOOKUP_VALUE_S)
    for size, seconds in ((_SHORT, _SHORT_S), (_LONG, _LONG_S)):
        for number in range(1000):
            worth.computed(size, seconds, 0)
            worth.found(size, is_hit=number * 37 % 100 < 100 * hits)
    return worth


def test_a_short_text_alone_is_computed() -> None:
    assert _worth().choose([_SHORT]) == [False]


def test_a_long_text_alone_is_looked_up() -> None:
    assert _worth().choose([_LONG]) == [True]


def test_short_texts_are_looked_up_where_enough_come_together() -> None:
    # Each saves 0.9 * 60 - 0.1 * 30 - 10 = 41 µs, so five pay for the look-up's 200 µs; the estimates are off by a few
    # per cent.
    assert _worth().choose([_SHORT] * 4) == [False] * 4
    assert _worth().choose([_SHORT] * 7) == [True] * 7


def test_what_is_hardly_ever_found_is_not_looked_up() -> None:
    assert _worth(hits=0.02).choose([_SHORT] * 32) == [False] * 32


def test_those_that_save_nothing_stay_behind() -> None:
    worth = _worth()
    for _ in range(500):
        worth.computed(8, 5e-6, 0)
    assert worth.choose([8, _LONG, 8]) == [False, True, False]


def test_a_slow_redis_is_not_asked() -> None:
    worth = _worth()
    for _ in range(200):
        worth.looked_up(1, 5e-3)
    assert worth.choose([_LONG]) == [False]


def test_what_was_never_computed_is_computed_first() -> None:
    # While all are hits, nothing else would tell what they save.
    worth = _worth()
    assert worth.choose([_LONG, 20_000]) == [True, False]
    worth.computed(20_000, 8e-3, 0)
    assert worth.choose([_LONG, 20_000]) == [True, True]


def test_a_text_that_is_quicker_computed_than_found_cannot_save_anything() -> None:
    worth = _worth()
    worth.computed(4, 1e-6, 0)
    assert not worth.could_save(4)
    assert worth.could_save(_SHORT)


def test_the_estimate_is_the_lower_quartile_whatever_the_outliers() -> None:
    chance = random.Random(7)
    estimate = RunningQuantile()
    seen = []
    for _ in range(4000):
        estimate.add(1e-3 if chance.random() < 0.4 else chance.uniform(1e-3, 50e-3))
        seen.append(estimate.value)
    assert sum(seen[1000:]) / len(seen[1000:]) == pytest.approx(1e-3, rel=0.1)


def test_the_estimate_follows_a_lasting_change() -> None:
    estimate = RunningQuantile()
    for _ in range(100):
        estimate.add(1.0)
    for _ in range(300):
        estimate.add(20.0)
    assert estimate.value == pytest.approx(20, rel=0.1)
