"""arrivals.py: the Poisson process, and when it sends."""

import itertools
import threading
import time

import numpy as np
import pytest

from neuronpipe.measure.load.arrivals import pace, poisson_arrivals_s


def test_arrivals_are_a_poisson_process() -> None:
    times_s = np.array([*poisson_arrivals_s(1000.0, 20.0, (7, 0))])
    gaps_s = np.diff(times_s)

    # 20,000 arrivals are expected, with a standard deviation of sqrt(20,000) = 141; four of them are 566.
    assert abs(len(times_s) - 20_000) < 566
    # An exponential gap has mean and standard deviation 1/rate; 20,000 of them estimate both within 0.7 %, and 3 % is
    # four times that.
    assert gaps_s.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps_s.std() == pytest.approx(1e-3, rel=0.03)
    assert (gaps_s >= 0).all()
    assert times_s[-1] < 20


def test_equal_seeds_give_equal_arrivals_and_different_ones_do_not() -> None:
    first, again, other = (list(poisson_arrivals_s(100.0, 1.0, seed)) for seed in ((1, 0), (1, 0), (1, 1)))
    assert first == again
    assert first != other


def test_there_may_be_no_arrival_at_all() -> None:
    # With 1e-6 arrivals expected.
    assert list(poisson_arrivals_s(1e-3, 1e-3, (0,))) == []


def test_nothing_is_sent_before_its_time_and_nothing_is_left_out() -> None:
    begin_s = time.monotonic()
    times_s = [begin_s + offset_s for offset_s in (-0.2, -0.1, 0.02, 0.02, 0.05)]
    sent: list[tuple[float, float]] = []

    pace(iter(times_s), lambda due_s: sent.extend((time_s, time.monotonic()) for time_s in due_s), threading.Event())

    assert [due_s for due_s, _ in sent] == times_s
    assert all(now_s >= due_s for due_s, now_s in sent)


def test_what_is_due_goes_out_before_the_next_one_is_waited_for() -> None:
    stop = threading.Event()
    sent: list[float] = []

    def send(due_s: list[float]) -> None:
        sent.extend(due_s)
        stop.set()

    pace(iter([0.0, 1.0, time.monotonic() + 3600]), send, stop)

    assert sent == [0.0, 1.0]


def test_stopping_ends_the_wait() -> None:
    stop = threading.Event()
    hours_s = (time.monotonic() + 3600 * hour for hour in itertools.count(1))
    thread = threading.Thread(target=pace, args=(hours_s, lambda due_s: None, stop))
    thread.start()
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
