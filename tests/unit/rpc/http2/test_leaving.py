"""rpc/http2/leaving.py: when a connection leaves, by times that a test chooses."""

import math

import pytest

from neuronpipe.rpc.http2.leaving import HOLD_S, Leaving, Phase

_NOTICE_LIMIT_S = 5.0


def _told(round_trip_s: float) -> Leaving:
    """A connection whose caller acknowledges at 100 s + `round_trip_s` the notice of 100 s."""
    leaving = Leaving()
    leaving.prepare_notice(100 - HOLD_S, can_hold=True)
    leaving.note_notice(100)
    leaving.acknowledge(100 + round_trip_s)
    return leaving


def test_a_connection_that_has_served_a_call_is_asked_at_once_and_a_new_one_after_a_moment() -> None:
    leaving = Leaving()
    leaving.ask(made_s=100)
    assert leaving.is_asked
    assert leaving.next_s == 100.25
    leaving.has_served = True
    leaving.ask(made_s=100)
    assert leaving.next_s == 0


def test_nothing_is_due_before_anybody_asks() -> None:
    leaving = Leaving()
    assert not leaving.is_asked
    assert leaving.next_s == leaving.ends_s == math.inf


@pytest.mark.parametrize(("round_trip_s", "waits_s"), [(0.001, 0.2), (0.1, 0.4)])
def test_a_connection_waits_for_streams_that_come_late_by_its_round_trip(round_trip_s: float, waits_s: float) -> None:
    leaving = _told(round_trip_s)
    assert leaving.phase is Phase.ACKNOWLEDGED
    assert leaving.next_s == pytest.approx(100 + round_trip_s + waits_s)


def test_each_late_stream_postpones_the_end_until_the_limit_of_the_notice() -> None:
    leaving = _told(0.001)
    leaving.postpone(101)
    assert leaving.next_s == pytest.approx(101.2)
    leaving.postpone(100 + _NOTICE_LIMIT_S)
    assert leaving.next_s == 100 + _NOTICE_LIMIT_S


def test_a_caller_that_acknowledges_nothing_gets_the_limit_of_the_notice() -> None:
    leaving = Leaving()
    leaving.prepare_notice(100, can_hold=False)
    assert leaving.next_s == 100 + HOLD_S + _NOTICE_LIMIT_S
    assert not leaving.holds_answers


@pytest.mark.parametrize(("round_trip_s", "held_s"), [(0.001, HOLD_S), (0.05, 0.05)])
def test_answers_are_held_for_a_round_trip_more_and_no_shorter_than_before_the_notice(
    round_trip_s: float, held_s: float
) -> None:
    leaving = Leaving()
    leaving.prepare_notice(100 - HOLD_S, can_hold=True)
    leaving.note_notice(100)
    assert leaving.holds_answers
    assert leaving.acknowledge(100 + round_trip_s) == pytest.approx(held_s)


def test_a_connection_that_goes_away_gives_no_further_notice_and_holds_no_answers() -> None:
    leaving = Leaving()
    leaving.ask(made_s=100)
    leaving.prepare_notice(100.25, can_hold=True)
    leaving.go_away()
    assert leaving.phase is Phase.GOING_AWAY
    assert not leaving.is_asked
    assert leaving.next_s == math.inf
    assert not leaving.holds_answers
