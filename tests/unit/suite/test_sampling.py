"""A sample that leaves out a kind of case, or changes from run to run, proves less than it seems to."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.suite.sampling import Sample

_CASES = [
    (text, side, number) for text, side, number in itertools.product(map(str, range(40)), ("left", "right"), (1, 3))
]


def _options(case: tuple[str, str, int]) -> tuple[str, int]:
    return case[1:]


def test_a_sample_has_its_share_of_the_cases_in_their_order() -> None:
    drawn = Sample(share=0.25).draw(_CASES, _options, at_least=160)
    assert len(drawn) == 40
    assert drawn == [case for case in _CASES if case in drawn]


def test_the_same_seed_draws_the_same_cases_and_another_seed_others() -> None:
    first, again, other = (Sample(share=0.25, seed=seed).draw(_CASES, _options, at_least=1) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("seed", range(20))
def test_every_value_of_every_option_is_in_the_smallest_sample(seed: int) -> None:
    rare = [*_CASES, ("last", "middle", 7)]
    drawn = Sample(share=1e-9, seed=seed).draw(rare, _options, at_least=1)
    assert {side for _, side, _ in drawn} == {"left", "right", "middle"}
    assert {number for _, _, number in drawn} == {1, 3, 7}
    assert len(drawn) <= 5


@pytest.mark.parametrize("seed", range(20))
def test_an_option_that_is_left_out_counts_as_a_kind_of_its_own(seed: int) -> None:
    def options(case: Mapping[str, Any]) -> Mapping[str, Any]:
        return case

    cases: list[Mapping[str, Any]] = [
        {"stride": 5, "labels": ["a"]},
        {"stride": 5, "labels": ["b"]},
        {"labels": ["a"]},
        {},
    ]
    assert {"stride" in case for case in Sample(1e-9, seed).draw(cases, options, at_least=4)} == {True, False}
    assert {} in Sample(1e-9, seed).draw(cases, options, at_least=4)


def test_the_whole_is_every_case() -> None:
    assert Sample(share=1).is_whole
    assert Sample(share=1).draw(_CASES, _options, at_least=160) == _CASES


def test_some_names_are_their_share_and_never_none() -> None:
    names = [str(number) for number in range(10)]
    assert len(Sample(share=0.3).some(names)) == 3
    assert len(Sample(share=1e-9).some(names)) == 1
    assert sorted(Sample(share=1).some(names)) == names


def test_fewer_cases_than_a_suite_is_meant_to_have_fail_in_a_sample_too() -> None:
    with pytest.raises(AssertionError, match="160 cases, expected 161"):
        Sample(share=0.1).draw(_CASES, _options, at_least=161)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_is_more_than_none_and_at_most_all(share: float) -> None:
    with pytest.raises(ValueError, match="must be more than 0 and at most 1"):
        Sample(share=share)


@pytest.mark.parametrize("marker", ["sampled", "long"])
def test_of_a_file_of_long_tests_a_share_runs_and_of_others_all(request: pytest.FixtureRequest, marker: str) -> None:
    def item(file: str, name: str, *, is_marked: bool) -> pytest.Item:
        made: pytest.Item = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        made.path = Path(file)
        if is_marked:
            made.add_marker(marker)
        return made

    long = [item("long", f"long{number}", is_marked=True) for number in range(10)]
    alone, short = item("other", "alone", is_marked=True), [item("short", "short", is_marked=False)]
    left_out = Sample(share=0.2).left_out([*long, alone, *short])
    assert len(left_out) == 8
    assert left_out <= set(long)
    assert Sample(share=1).left_out([*long, alone, *short]) == set()
