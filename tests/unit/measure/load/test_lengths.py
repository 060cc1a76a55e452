"""lengths.py: lengths are drawn as their distribution says, and what is none is named."""

import numpy as np
import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.lengths import Lengths


def _draw(text: str, count: int = 2000) -> list[int]:
    random = np.random.default_rng(0)
    lengths = Lengths.parse(text, "--prompt-tokens")
    return [lengths.draw(random) for _ in range(count)]


def test_a_number_is_the_length_of_all() -> None:
    assert set(_draw("64")) == {64}


def test_uniform_lengths_reach_both_ends() -> None:
    found = _draw("uniform:3,6")
    assert set(found) == {3, 4, 5, 6}


def test_lognormal_lengths_have_their_median_and_90th_percentile() -> None:
    median, p90 = np.percentile(_draw("lognormal:100,400", 20_000), (50, 90))
    # Of 20,000 draws the standard error of these is 1 % and 2 %.
    assert median == pytest.approx(100, rel=0.05)
    assert p90 == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "1.5", "32769", "uniform:5", "uniform:6,5", "normal:1,2", "lognormal:1,2,3"]
)
def test_what_is_no_distribution_is_named_with_its_option(text: str) -> None:
    with pytest.raises(SetupError) as caught:
        Lengths.parse(text, "--prompt-tokens")
    assert str(caught.value).startswith(f"--prompt-tokens {text}: must be N, uniform:LOW,HIGH or lognormal:MEDIAN,P90")
