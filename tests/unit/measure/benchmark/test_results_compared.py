"""results.py and costs.py: what is worse is named, and noise is not."""

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.costs import Advice, Goal, Instance, advise
from neuronpipe.measure.benchmark.results import CellResult, compare_results, compared_rows, differences
from tests.unit.measure.benchmark.written_runs import cell, result, run


def test_a_regression_is_named_and_noise_is_none() -> None:
    before = run([result(cell(), 20.0), result(cell(8), 100.0), result(cell(16), 200.0)])
    after = run([result(cell(), 20.1, seed=1), result(cell(8), 120.0, seed=1), result(cell(16), 150.0, seed=1)])
    same, worse, better = compare_results(before, after)
    assert not same.is_regression(0.05)
    assert not same.is_improvement(0.05)
    assert worse.is_regression(0.05)
    assert worse.p50 is not None
    assert worse.p50.value == pytest.approx(1.2, rel=0.01)
    assert not worse.is_regression(0.25)
    assert better.is_improvement(0.05)
    assert [row[-1] for row in compared_rows([same, worse, better], 0.05)] == ["", "", "REGRESSION", "better"]


def test_a_cell_that_can_no_longer_be_measured_is_a_regression() -> None:
    (found,) = compare_results(run([result(cell(), 20.0)]), run([CellResult(cell=cell(), reason="too little memory")]))
    assert found.is_regression(0.05)
    assert "too little memory" in compared_rows([found], 0.05)[1][-1]


def test_runs_without_a_common_cell_are_refused_and_other_machines_are_named() -> None:
    first, second = run([result(cell(1), 20.0)]), run([result(cell(2), 20.0)])
    with pytest.raises(SetupError, match="no cell in common"):
        compare_results(first, second)
    second.machine["CPU"] = "two"
    assert differences(first, second) == ["CPU: one | two"]


def test_the_cheapest_of_those_that_are_quick_enough_is_advised() -> None:
    found = run([result(cell(1), 10.0), result(cell(8), 40.0), result(cell(32), 100.0)])
    small, large = (Instance(name, 2, {"on-demand": price}) for name, price in (("small", 0.1), ("large", 0.5)))
    # Batch 8: 200 a second, at 70 % 140, so four replicas; batch 1: 100 a second, so eight. Batch 32 is too slow.
    advice = advise(found, Goal(50.0, 500.0), [large, small])["bert-base-uncased"]
    assert isinstance(advice, Advice)
    assert (advice.result.cell.batch, advice.replicas, advice.instance) == (8, 4, "small")
    assert advice.per_hour == pytest.approx(0.4)
    nothing = advise(found, Goal(1.0, 500.0), [small])["bert-base-uncased"]
    assert isinstance(nothing, str)
    assert "the lowest p95 is 10" in nothing
    unpriced = advise(found, Goal(50.0, 500.0), [Instance("new", 2, {})])["bert-base-uncased"]
    assert isinstance(unpriced, Advice)
    assert unpriced.per_hour is None
