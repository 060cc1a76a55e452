"""core/model.py: how a request's words find a model."""

import pytest

from neuronpipe.core.errors import InvalidInput, ModelNotFound
from neuronpipe.core.model import ModelTable

_TABLE = ModelTable({("b", 2): "b2", ("a", 10): "a10", ("b", 1): "b1", ("a", 9): "a9"})


def test_without_a_version_the_newest_is_found() -> None:
    assert _TABLE.find("a", "") == "a10"  # by number, not by letter, in which 9 is behind 10


def test_a_version_is_found_by_its_number() -> None:
    assert _TABLE.find("a", "9") == "a9"


def test_entries_come_by_name_and_then_version() -> None:
    assert list(_TABLE) == ["a9", "a10", "b1", "b2"]


def test_only_the_newest_version_is_the_default() -> None:
    assert [_TABLE.is_newest("a", version) for version in (9, 10)] == [False, True]


def test_an_unknown_model_is_told_which_there_are() -> None:
    with pytest.raises(ModelNotFound, match=r"model 'c' is not served; served are: a, b$"):
        _TABLE.find("c", "")


def test_an_unknown_version_is_told_which_there_are() -> None:
    with pytest.raises(ModelNotFound, match=r"model 'a' has no version 3; it has: 9, 10$"):
        _TABLE.find("a", "3")


@pytest.mark.parametrize("version", ["latest", "1.0", "-1", " 1", "²", "١"])
def test_a_version_that_is_no_whole_number_is_refused(version: str) -> None:
    with pytest.raises(InvalidInput, match="is not a whole number") as caught:
        _TABLE.find("a", version)
    assert caught.value.field == "version"


def test_a_version_of_thousands_of_digits_is_refused_without_repeating_it() -> None:
    # int() raises ValueError from 4,301 digits on, and an answer that repeats them all would not fit into gRPC's trailers.
    with pytest.raises((InvalidInput, ModelNotFound)) as caught:
        _TABLE.find("a", "9" * 5000)
    assert len(caught.value.message) < 500


def test_a_name_of_thousands_of_characters_is_refused_without_repeating_it() -> None:
    with pytest.raises((InvalidInput, ModelNotFound)) as caught:
        _TABLE.find("x" * 5000, "")
    assert len(caught.value.message) < 500
