"""stages/neuron_executor/batching.py: the bucket that does most work a second."""

import math
import random
from collections.abc import Sequence

import pytest

from neuronpipe.bundles.buckets import BucketPlan, parse_bucket
from neuronpipe.stages.neuron_executor.batching import best_bucket


def _best(
    plan: Sequence[str], waiting: Sequence[tuple[int, int]], times: dict[int, float], room_s: float = math.inf
) -> str:
    """`times`: by the tokens computed."""
    return str(best_bucket([parse_bucket(one) for one in plan], waiting, times.__getitem__, room_s))


# AWS's figures for BERT-base on inf2, length 128, one core, in ms: a bucket of 1 takes 1.0, one of 8 takes 6.0.
_PLAN, _TIMES = ("1x128", "8x128", "16x128"), {128: 1.0, 8 * 128: 6.0, 16 * 128: 12.5}


@pytest.mark.parametrize(
    ("waiting", "expected"),
    # Sequences a ms: 1/1 against 6/6 and 8/6; of equals the smaller. Sixteen of 16 are 1.28, eight of 8 1.33.
    [(1, "1x128"), (5, "1x128"), (6, "1x128"), (7, "8x128"), (8, "8x128"), (100, "8x128")],
)
def test_the_batch_size_is_the_one_that_computes_most_a_second(waiting: int, expected: str) -> None:
    assert _best(_PLAN, [(128, waiting)], _TIMES) == expected


def test_a_batch_that_would_be_too_late_for_its_oldest_sequence_is_not_taken() -> None:
    assert _best(_PLAN, [(128, 8)], _TIMES, room_s=6.0) == "1x128"


def test_where_every_batch_would_be_late_the_smallest_is_taken() -> None:
    assert _best(_PLAN, [(128, 8)], _TIMES, room_s=0.5) == "1x128"


@pytest.mark.parametrize(("waiting", "expected"), [(1, "1x128"), (2, "8x128"), (9, "8x128")])
def test_where_nothing_is_known_as_many_as_fit_run_together(waiting: int, expected: str) -> None:
    assert _best(_PLAN[:2], [(128, waiting)], dict.fromkeys(_TIMES, 0.0)) == expected


@pytest.mark.parametrize(
    ("waiting", "expected"),
    # A second each in 1x16, five for sixteen of them in 16x64.
    [(1, "1x16"), (5, "1x16"), (6, "16x64"), (100, "16x64")],
)
def test_a_longer_bucket_is_taken_where_it_computes_more_a_second(waiting: int, expected: str) -> None:
    assert _best(("1x16", "16x64"), [(16, waiting)], {16: 1.0, 1024: 5.0}) == expected


def test_short_sequences_in_its_rows_do_not_make_a_long_bucket_worth_its_time() -> None:
    # One of 8 tokens and seven of 4: a long batch for all of them takes 65, 1x8 and then 8x4 take 9 + 33.
    assert _best(("8x4", "1x8", "8x8"), [(8, 1), (4, 7)], {32: 33.0, 8: 9.0, 64: 65.0}) == "1x8"


@pytest.mark.parametrize(
    ("long_ones", "expected"),
    # One of 4 tokens: apart from the others it takes 20. One of 8 takes 24 besides, three of them 48; all together 48.
    [(1, "1x4"), (3, "4x8")],
)
def test_longer_sequences_are_joined_where_their_batch_has_room(long_ones: int, expected: str) -> None:
    assert _best(("1x4", "1x8", "4x8"), [(4, 1), (8, long_ones)], {4: 20.0, 8: 24.0, 32: 48.0}) == expected


def test_a_bucket_that_is_too_short_is_never_taken() -> None:
    seed = 20261121
    generator = random.Random(seed)
    for _ in range(500):
        plan = BucketPlan(
            parse_bucket(f"{generator.choice((1, 4, 16))}x{generator.choice((16, 32, 64, 128))}") for _ in range(5)
        )
        lengths = sorted({bucket.tokens for bucket in plan.buckets})
        waiting = [
            (length, generator.randint(1, 40))
            for length in generator.sample(lengths, k=generator.randint(1, len(lengths)))
        ]
        room_s = generator.choice((0.0, 100.0, math.inf))
        best = best_bucket(plan.buckets, waiting, lambda tokens: 10.0 + tokens, room_s)
        assert best.tokens >= waiting[0][0], f"seed {seed}"
