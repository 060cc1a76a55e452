"""core/errors.py: one class for each thing that a caller can do."""

import re

import pytest

from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError, first_line
from tests.unit.every_error import EVERY_ERROR


def _descendants(kind: type[NeuronpipeError]) -> set[type[NeuronpipeError]]:
    children = set(kind.__subclasses__())
    return children.union(*(_descendants(child) for child in children))


def test_every_class_of_error_takes_part_in_the_tests_that_hold_for_all() -> None:
    assert {type(error) for error in EVERY_ERROR} == _descendants(NeuronpipeError)


def test_reasons_tell_errors_apart() -> None:
    reasons = [error.reason for error in EVERY_ERROR]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_a_reason_is_a_stable_word_as_ErrorInfo_wants_it(error: NeuronpipeError) -> None:
    # google/rpc/error_details.proto: "at most 63 characters and match a regular expression of [A-Z][A-Z0-9_]+[A-Z0-9]".
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{1,61}[A-Z0-9]", error.reason)


def test_the_message_of_an_invalid_input_begins_with_the_field() -> None:
    assert InvalidInput("top_k", "5, the model has 4 labels").message == "top_k: 5, the model has 4 labels"


def test_a_setup_error_is_none_of_the_errors_that_callers_get() -> None:
    assert not issubclass(SetupError, NeuronpipeError)


@pytest.mark.parametrize(
    ("said", "shown"), [("one\ntwo", "one"), ("It failed:\n  why", "It failed: why"), ("", "ValueError")]
)
def test_of_what_another_library_says_the_reason_is_shown(said: str, shown: str) -> None:
    assert first_line(ValueError(said)) == shown
