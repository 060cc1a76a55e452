"""A comparison that cannot fail proves nothing."""

from typing import Any

import pytest

from tests.oracle.comparison import Comparison

_A, _B, _C = ({"label": label, "score": score} for label, score in (("a", 0.5), ("b", 0.49999), ("c", 0.2)))


@pytest.fixture
def comparison() -> Comparison:
    return Comparison("test", "a reference")


def test_equal_values_match_and_the_largest_difference_is_kept(comparison: Comparison) -> None:
    comparison.compare("first", {"text": "x", "scores": [0.5, 0.1]}, {"text": "x", "scores": [0.50001, 0.1]})
    comparison.compare("second", [1], [1])

    comparison.check(at_least=2)
    assert comparison.largest_difference == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (0.5, 0.501),
        (float("nan"), 0.5),
        ("x", "y"),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (3, 4),
        ([{"a": "x"}], [{"a": "y"}]),
        (None, 0.0),
    ],
)
def test_values_that_differ_do_not_match(ours: Any, expected: Any, comparison: Comparison) -> None:
    comparison.compare("case", ours, expected)

    assert len(comparison.mismatches) == 1
    with pytest.raises(AssertionError, match="1 of 1 cases differ"):
        comparison.check(at_least=1)


def test_fewer_cases_than_meant_fail(comparison: Comparison) -> None:
    with pytest.raises(AssertionError, match="0 cases compared, expected 1"):
        comparison.check(at_least=1)


@pytest.mark.parametrize(
    "ours", [[_A, _B, _C], [_B, _A, _C]], ids=["same order", "two of nearly the same score swapped"]
)
def test_results_in_the_order_of_their_scores_match(ours: list[dict[str, Any]], comparison: Comparison) -> None:
    comparison.compare_ranked("case", ours, [_A, _B, _C])

    comparison.check(at_least=1)


def test_the_last_result_may_be_another_of_nearly_the_same_score(comparison: Comparison) -> None:
    comparison.compare_ranked("case", [_A], [_B])

    comparison.check(at_least=1)


@pytest.mark.parametrize(
    "ours",
    [[_A, _C, _B], [_A, _B], [_A, _B, {**_C, "label": "d"}, _C], [{**_A, "label": "d"}, _B, _C]],
    ids=["order", "one missing", "one more", "another"],
)
def test_results_that_rounding_does_not_explain_differ(ours: list[dict[str, Any]], comparison: Comparison) -> None:
    comparison.compare_ranked("case", ours, [_A, _B, _C])

    assert len(comparison.mismatches) == 1
