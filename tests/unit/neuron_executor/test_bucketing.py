"""neuron_executor/bucketing.py: the batch size that computes most a second."""

import math

import pytest

from neuronpipe.bundles.compiler.device_times import DEVICE_TIMES
from neuronpipe.neuron_executor.bucketing import best_batch

# AWS's figures for BERT-base on inf2, length 128, one core, in ms: a bucket of 1 takes 1.0, one of 8 takes 6.0.
_TIMES = {1: 1.0, 8: 6.0, 16: 12.5}


@pytest.mark.parametrize(
    ("waiting", "expected"),
    # Sequences a ms: 1/1 against 6/6 and 8/6; of equals the smaller. Sixteen of 16 are 1.28, eight of 8 1.33.
    [(1, 1), (5, 1), (6, 1), (7, 8), (8, 8), (100, 8)],
)
def test_the_batch_size_is_the_one_that_computes_most_a_second(waiting: int, expected: int) -> None:
    assert best_batch((1, 8, 16), waiting, _TIMES.__getitem__, math.inf) == expected


def test_a_batch_that_would_be_too_late_for_its_oldest_sequence_is_not_taken() -> None:
    assert best_batch((1, 8), 8, _TIMES.__getitem__, 6.0) == 1


def test_where_every_batch_would_be_late_the_smallest_is_taken() -> None:
    assert best_batch((1, 8), 8, _TIMES.__getitem__, 0.5) == 1


@pytest.mark.parametrize(("waiting", "expected"), [(1, 1), (2, 8), (9, 8)])
def test_where_nothing_is_known_as_many_as_fit_run_together(waiting: int, expected: int) -> None:
    assert best_batch((1, 8), waiting, lambda batch: 0.0, math.inf) == expected


def test_the_simulated_times_are_those_of_one_of_the_two_cores_that_the_published_throughput_is_of() -> None:
    # 2 x 1 / 1998.21 and 2 x 8 / 2674.19 seconds; 2 x 1 / 3401.97 and 2 x 16 / 5307.88.
    assert DEVICE_TIMES == {
        "inf2-bert-base": {"1x128": 1.001, "8x128": 5.983},
        "inf2-distilbert": {"1x128": 0.588, "16x128": 6.029},
    }
