"""platform/process/running_time.py: what lasts has the time in which this process ran, and no other."""

from neuronpipe.platform.process.running_time import RunningTime


def test_the_time_of_a_subject_begins_at_the_first_look() -> None:
    time = RunningTime(10)
    assert time.look_s == 1
    assert [time.look("a", now_s) for now_s in (50.0, 51.0, 52.125, 52.25)] == [0, 1, 2.125, 2.25]


def test_a_standstill_is_no_time_of_a_subject() -> None:
    time = RunningTime(10)
    assert [time.look("a", now_s) for now_s in (50, 51, 59, 60, 61, 1000, 1001)] == [0, 1, 1, 2, 3, 3, 4]


def test_another_subject_begins_anew_and_none_has_no_time() -> None:
    time = RunningTime(10)
    looks = [("a", 1), ("a", 2), ("b", 3), ("b", 4), (None, 5), (None, 6), ("b", 7), ("b", 8)]
    assert [time.look(subject, now_s) for subject, now_s in looks] == [0, 1, 0, 1, 0, 0, 0, 1]
