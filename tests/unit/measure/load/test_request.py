"""measure/load/request.py: values out of range are named, and lengths drawn as their distribution says."""

import math
from typing import Any

import numpy as np
import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.request import GenerationLoad, Lengths, LoadRequest


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


def _request(**changes: Any) -> LoadRequest:
    return LoadRequest(**{"target": "h:1", "model": "m", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": " "}, "--target: is empty"),
        ({"model": ""}, "--model: is empty"),
        ({"rate_per_s": math.nan}, "--rate nan: must be more than 0 and at most 100,000 requests a second"),
        ({"rate_per_s": 0.0}, "--rate 0: must be more than 0"),
        ({"rate_per_s": -1.0}, "--rate -1: must be more than 0"),
        ({"rate_per_s": 100_001.0}, "--rate 100001: must be more than 0 and at most 100,000"),
        ({"rate_per_s": math.inf}, "--rate inf: must be"),
        ({"concurrency": 0}, "--concurrency 0: must be from 1 to 10,000"),
        ({"concurrency": 10_001}, "--concurrency 10001: must be from 1 to 10,000"),
        ({"rate_per_s": 5.0, "concurrency": 2}, "--rate 5 and --concurrency 2: give one of them, not both"),
        ({"duration_s": 0.0}, "--duration 0: must be more than 0 and at most 86,400 s"),
        ({"duration_s": math.nan}, "--duration nan: must be more than 0"),
        ({"duration_s": 86_401.0}, "--duration 86401: must be more than 0 and at most 86,400 s"),
        ({"warm_up_s": -0.1}, "--warm-up -0.1: must be from 0 to 3,600 s"),
        ({"warm_up_s": math.nan}, "--warm-up nan: must be from 0 to 3,600 s"),
        ({"processes": 0}, "--processes 0: must be from 1 to 64"),
        ({"processes": 65, "concurrency": 100}, "--processes 65: must be from 1 to 64"),
        ({"processes": 3, "concurrency": 2}, "--processes 3: must be at most --concurrency 2"),
        ({"processes": 2}, "--processes 2: must be at most --concurrency 1"),
        ({"deadline_ms": 0.0}, "--deadline-ms 0: must be more than 0 and at most 3,600,000 ms"),
        ({"deadline_ms": math.nan}, "--deadline-ms nan: must be"),
        ({"deadline_ms": 3_600_001.0}, "--deadline-ms 3.6e+06: must be more than 0 and at most 3,600,000 ms"),
        ({"priority": "high"}, "--priority high: must be one of interactive, bulk"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named_with_its_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        _request(**changes)
    assert str(caught.value).startswith(message)


def test_what_is_at_its_limit_is_taken() -> None:
    _request(
        concurrency=10_000,
        duration_s=86_400.0,
        warm_up_s=3_600.0,
        processes=64,
        deadline_ms=3_600_000.0,
        priority="bulk",
    )
    _request(rate_per_s=100_000.0, warm_up_s=0.0, processes=64)


def test_one_caller_is_the_default() -> None:
    assert _request().callers == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_prefix_tokens": 32_769}, "--shared-prefix-tokens 32769: must be from 0 to 32,768"),
        ({"num_beams": 0}, "--num-beams 0: must be from 1 to 16"),
        ({"first_token_limit_ms": 0.0}, "--ttft-ms 0: must be more than 0 and at most 3,600,000 ms"),
        ({"token_limit_ms": math.nan}, "--itl-ms nan: must be more than 0"),
    ],
    ids=str,
)
def test_what_is_out_of_range_of_generated_texts_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        GenerationLoad(**changes)
    assert str(caught.value).startswith(message)
