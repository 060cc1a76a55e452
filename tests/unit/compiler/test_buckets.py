"""compiler/buckets.py: the planner's plan is the best there is, and lengths that cannot be read are named."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from neuronpipe.compiler.buckets import BucketRequest, choose_buckets, plan_lengths, read_lengths
from neuronpipe.core.errors import SetupError

_SEED = 20261121


def _computed(counts: Mapping[int, int], plan: tuple[int, ...]) -> int:
    return sum(count * min(bucket for bucket in plan if bucket >= length) for length, count in counts.items())


def _least_computed(counts: Mapping[int, int], max_lengths: int) -> int:
    """By trying every set of lengths up to the longest, those included that do not occur."""
    longest = max(counts)
    return min(
        _computed(counts, (*chosen, longest))
        for size in range(min(max_lengths, longest))
        for chosen in itertools.combinations(range(1, longest), size)
    )


@pytest.mark.parametrize("max_lengths", [1, 2, 3, 4])
def test_no_other_buckets_pad_less(max_lengths: int) -> None:
    generator = random.Random(_SEED)
    for _ in range(60):
        counts = {generator.randint(1, 14): generator.randint(1, 20) for _ in range(generator.randint(1, 9))}
        plan = plan_lengths(counts, max_lengths)
        assert len(plan.lengths) <= max_lengths
        assert _computed(counts, plan.lengths) == _least_computed(counts, max_lengths), f"seed {_SEED}: {counts}"


def test_the_waste_is_told_beside_that_of_one_bucket_and_of_powers_of_two() -> None:
    # 10 x 3 + 10 x 5 + 1 x 16 = 96 tokens. Two buckets: 20 x 5 + 16 = 116. One: 21 x 16 = 336. Powers of two: 10 x 4 +
    # 10 x 8 + 16 = 136.
    plan = plan_lengths({3: 10, 5: 10, 16: 1}, 2)
    assert plan.lengths == (5, 16)
    found = (plan.waste, plan.single_waste, plan.power_of_two_waste)
    assert found == pytest.approx((1 - 96 / 116, 1 - 96 / 336, 1 - 96 / 136))
    assert plan.powers_of_two == 3


def test_powers_of_two_end_with_the_longest_sequence() -> None:
    assert plan_lengths({9: 1}, 1).power_of_two_waste == 0


def test_there_are_no_more_buckets_than_lengths() -> None:
    assert plan_lengths({4: 2, 7: 1}, 10).lengths == (4, 7)


@pytest.mark.parametrize("max_lengths", [0, 65])
def test_a_number_of_lengths_out_of_bounds_is_refused_with_the_limit(max_lengths: int) -> None:
    with pytest.raises(SetupError, match=f"--max-lengths {max_lengths}: must be from 1 to 64"):
        plan_lengths({4: 2}, max_lengths)


def test_lengths_are_counted_and_those_beyond_the_model_count_as_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("5\n7 3\n\n5 2\n900\n8 0\n")
    assert read_lengths(path, 512) == Counter({5: 3, 7: 3, 512: 1})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("5\nx\n", "line 2: must be a length from 1 to 65536"),
        ("0\n", "line 1: "),
        ("70000\n", "line 1: "),
        ("5 2 1\n", "line 1: "),
        pytest.param(f"5 {'9' * 5000}\n", "line 1: ", id="a count of 5000 digits"),
        ("-5\n", "line 1: "),
        ("5 0\n", "holds no length"),
        ("", "holds no length"),
        ("ü\n", "line 1: must be a length"),
    ],
)
def test_a_file_without_lengths_is_refused_with_the_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(content)
    with pytest.raises(SetupError, match=f"^--lengths {path}: {message}"):
        read_lengths(path, 512)


def test_auto_makes_every_batch_size_for_every_length(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("5\n7\n")
    buckets, plan = choose_buckets(BucketRequest(("auto",), path, max_lengths=2, batches=(8, 1)), 512)
    assert [str(bucket) for bucket in buckets] == ["1x5", "8x5", "1x7", "8x7"]
    assert plan is not None
    assert "lengths 5, 7: 0.0% of the tokens are padding" in plan.describe()
