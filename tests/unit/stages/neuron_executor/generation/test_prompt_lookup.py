"""prompt_lookup.py: a draft is what followed the last tokens of a text before."""

from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup


def test_a_draft_is_what_followed_the_last_tokens_and_of_several_places_the_last() -> None:
    lookup = PromptLookup([], 3)
    assert lookup.draft([1, 2, 3, 4, 1, 2], 8) == [3, 4, 1]
    assert lookup.draft([1, 2, 3, 4, 1, 2, 5, 1, 2], 8) == [5, 1, 2]


def test_three_tokens_that_are_the_same_go_before_two() -> None:
    assert PromptLookup([], 1).draft([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 8) == [3]


def test_without_a_place_before_there_is_no_draft() -> None:
    lookup = PromptLookup([], 3)
    assert lookup.draft([1], 8) == []
    assert lookup.draft([1, 2, 1], 8) == [], "one token is not enough"
    assert lookup.draft([1, 2, 1, 3], 8) == []


def test_a_source_is_looked_up_too() -> None:
    lookup = PromptLookup([5, 6, 7, 8], 2)
    assert lookup.draft([0], 8) == []
    assert lookup.draft([0, 5, 6], 8) == [7, 8]
    assert lookup.draft([0, 5, 6, 7, 8], 8) == [0, 5], "what the source ends with, and the text goes on with"


def test_a_draft_is_no_longer_than_there_is_room_and_by_one_than_what_was_accepted() -> None:
    lookup, text = PromptLookup([], 4), [1, 2, 3, 4, 5, 6, 1, 2]
    assert lookup.draft(text, 2) == [3, 4]
    lookup.note(1)
    assert lookup.draft(text, 8) == [3, 4]
    lookup.note(4)
    assert lookup.draft(text, 8) == [3, 4, 5, 6]


def test_after_wrong_drafts_there_is_none_for_longer_and_longer_until_one_is_right() -> None:
    lookup, text = PromptLookup([], 4), [1, 2, 3, 4, 5, 6, 1, 2]

    def pause() -> int:
        return next(steps for steps in range(10) if lookup.draft(text, 8) == [3])

    pauses = []
    for _ in range(5):
        lookup.note(0)
        pauses.append(pause())
    assert pauses == [1, 3, 7, 7, 7]
    lookup.note(1)
    assert lookup.draft(text, 8) == [3, 4]
