"""platform/cache/breaker.py: when Redis is asked, left alone, and tried again."""

import itertools

import pytest

from neuronpipe.platform.cache.breaker import Breaker


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_asked_before_a_probe_went_well() -> None:
    breaker = Breaker()
    assert not breaker.is_closed
    assert breaker.pause_s == 0
    breaker.close()
    assert breaker.is_closed


def test_one_failure_opens_it() -> None:
    breaker = Breaker()
    breaker.close()
    breaker.open()
    assert not breaker.is_closed


def test_the_next_probe_is_due_after_a_pause() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    breaker.close()
    breaker.open()
    assert breaker.pause_s == pytest.approx(0.1)
    clock.now_s += 0.11
    assert breaker.pause_s == 0


def test_pauses_grow_to_five_seconds_and_begin_anew_after_ten_that_went_well() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(8):
        breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += breaker.pause_s
    assert [round(pause, 3) for pause in pauses] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    breaker.close()
    clock.now_s += 10
    assert breaker.open()
    assert round(breaker.pause_s, 3) == 0.1


def test_probes_that_succeed_where_questions_fail_do_not_begin_the_pauses_anew() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(4):
        breaker.close()
        clock.now_s += 0.5
        assert not breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += breaker.pause_s
    assert [round(pause, 3) for pause in pauses] == [0.1, 0.2, 0.4, 0.8]


def test_failures_of_what_was_under_way_do_not_make_the_pause_longer() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    breaker.close()
    for _ in range(50):
        breaker.open()
    assert breaker.pause_s == pytest.approx(0.1)


def test_pauses_never_shrink_while_failures_go_on() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(20):
        breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += 10
    assert all(before <= after for before, after in itertools.pairwise(pauses))
