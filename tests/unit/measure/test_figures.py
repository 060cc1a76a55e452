"""figures.py: intervals hold the true value as often as they say."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

from neuronpipe.measure.figures import bootstrap, distribution, mean, median, p95, ratio


def test_the_interval_holds_the_true_mean_in_about_95_of_100_samples() -> None:
    samples = np.random.default_rng(3).exponential(10.0, (400, 80))
    held = sum(found.low <= 10.0 <= found.high for found in (bootstrap(row, mean) for row in samples))
    # Of 95 %, a little less for few and skewed samples; three standard errors are 3.3 %.
    assert 0.89 <= held / 400 <= 0.98


def test_more_samples_make_the_interval_narrower() -> None:
    random = np.random.default_rng(4)
    few, many = (bootstrap(random.normal(100, 10, count), p95) for count in (50, 5000))
    assert many.relative_width < few.relative_width / 3
    assert few.low <= few.value <= few.high


def test_a_ratio_of_a_tenth_more_is_found_and_noise_alone_is_none() -> None:
    random = np.random.default_rng(5)
    before, same, slower = random.normal(20, 1, 200), random.normal(20, 1, 200), random.normal(22, 1, 200)
    assert ratio(slower, before, median).low > 1.05
    noise = ratio(same, before, median)
    assert noise.low < 1.02
    assert noise.high > 0.98


def test_equal_samples_have_equal_intervals_and_none_are_an_error() -> None:
    assert bootstrap([1.0, 2.0, 3.0], median) == bootstrap([1.0, 2.0, 3.0], median)
    with pytest.raises(ValueError, match="no samples"):
        bootstrap([], median)


def test_many_samples_take_no_more_memory_than_a_few_resamples_of_them() -> None:
    samples = np.random.default_rng(6).normal(100, 10, 50_000)
    tracemalloc.start()
    try:
        bootstrap(samples, mean)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 << 20  # all 1,000 resamples together, and their places, are 800 MB


def test_distribution_of_known_values() -> None:
    found = distribution(np.arange(101, 0, -1, dtype=np.float32))
    # Of 1 … 101 the p-th percentile lies at index p: 1 + p.
    assert found is not None
    assert dataclasses.astuple(found) == (51.0, 51.0, 91.0, 96.0, 100.0, 101.0)


def test_there_is_no_distribution_of_nothing() -> None:
    assert distribution(np.array([])) is None
