"""generation/pace.py: how much of a prompt a step may have, and how long new prompts wait."""

import pytest

from neuronpipe.stages.neuron_executor.generation.pace import Pace


def _pace(answering_s: float = 0.05, token_s: float = 0.001) -> Pace:
    pace = Pace(part_tokens=16)
    pace.note_step(0, 4, answering_s)
    pace.note_step(100, 4, answering_s + 100 * token_s)
    return pace


def test_nothing_is_limited_before_both_are_measured() -> None:
    pace = Pace(part_tokens=16)
    assert pace.most_read_tokens(answered=4, unread=1) == float("inf")
    pace.note_step(0, 4, 0.01)
    assert pace.most_read_tokens(answered=4, unread=1) == float("inf")


def test_a_step_with_a_prompt_takes_twice_as_long_as_one_without() -> None:
    assert _pace().most_read_tokens(answered=4, unread=1) == pytest.approx(50)
    assert _pace(answering_s=0.2).most_read_tokens(answered=4, unread=1) == pytest.approx(200)
    assert _pace(token_s=0.0001).most_read_tokens(answered=4, unread=1) == pytest.approx(500)


def test_a_step_takes_longer_where_more_texts_wait_for_their_first_token_than_for_the_next_one() -> None:
    found = [_pace().most_read_tokens(4, unread) for unread in (0, 4, 8, 12, 1000)]
    assert found == pytest.approx([50, 50, 100, 150, 150])


def test_a_prompt_advances_however_slow_it_is() -> None:
    assert _pace(token_s=10).most_read_tokens(answered=4, unread=1) == 16


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    pace = Pace(part_tokens=16)
    pace.note_step(0, 4, 0.05)
    pace.note_step(2000, 0, 2.0)  # 1 ms a token
    pace.note_step(1, 0, 0.03)
    assert pace.most_read_tokens(answered=4, unread=1) == pytest.approx(50, rel=0.02)


def test_the_means_follow_what_was_measured_last() -> None:
    pace = _pace()
    for _ in range(50):
        pace.note_step(0, 4, 0.2)
    assert pace.most_read_tokens(answered=4, unread=1) == pytest.approx(200, rel=0.01)


def test_where_prompts_come_all_the_time_a_step_without_is_measured_now_and_then() -> None:
    pace, without = _pace(), []
    for step in range(2, 200):  # as many texts as make a step without prompts take 200 ms, in place of 50
        if read_tokens := int(pace.most_read_tokens(answered=4, unread=1)):
            pace.note_step(read_tokens, 32, 0.2 + read_tokens * 0.001)
        else:
            without.append(step)
            pace.note_step(0, 32, 0.2)
    assert without == list(range(without[0], 200, 17))
    assert 170 < pace.most_read_tokens(answered=4, unread=1) < 210


def test_a_prompt_waits_until_those_before_it_leave_a_place() -> None:
    pace = Pace(part_tokens=16)
    assert pace.wait_s(texts=100, places=4) == 0, "nothing was measured yet"
    pace.note_text(2.0)
    assert pace.wait_s(texts=4, places=4) == 0
    assert pace.wait_s(texts=5, places=4) == pytest.approx(0.5)
    assert pace.wait_s(texts=12, places=4) == pytest.approx(4)
