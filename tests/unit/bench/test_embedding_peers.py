"""Embeddings beside other systems: right vectors, and the part of the page."""

from pathlib import Path

import numpy as np
import pytest

from tests.bench.embedding_peers import SECTION, TRIALS, wrong_vectors
from tests.bench.measurements import Measurement
from tests.bench.report import Run, keep_sections, write_report

# Two directions at a right angle, and one that is 0.2 (1 - cosine) from the first.
_EXPECTED = np.array([[1, 0], [0, 1]], np.float32)
_NEAR = np.array([[0.8, 0.6], [0, 1]], np.float32)


@pytest.mark.parametrize(
    ("vectors", "is_ordered", "wrong"),
    [
        (_EXPECTED, True, ""),
        (_EXPECTED[::-1], False, ""),
        (_EXPECTED[::-1], True, "a vector is 1.0000 away (1 - cosine); the limit is 0.1"),
        (_NEAR, True, "a vector is 0.2000 away (1 - cosine); the limit is 0.1"),
        # The second expected vector is there twice, the first is not.
        (_EXPECTED[[1, 1]], False, "a vector is 1.0000 away (1 - cosine); the limit is 0.1"),
        (_EXPECTED[:1], True, "vectors [1, 2] instead of [2, 2]"),
    ],
)
def test_a_vector_is_wrong_by_its_direction(vectors: np.ndarray, is_ordered: bool, wrong: str) -> None:
    assert wrong_vectors(vectors, _EXPECTED, 0.1, is_ordered=is_ordered) == wrong


def _turn(system: str, callers: int, rate: float, median_ms: float, section: str = SECTION) -> Measurement:
    return Measurement(
        section=section, system=system, callers=callers, round=0, throughput_per_s=rate, latencies_ms={"p50": median_ms}
    )


def test_the_page_has_ratios_the_settings_and_the_reasons_of_what_is_missing(tmp_path: Path) -> None:
    run = Run("python -m tests.bench", {"instructions": "AVX2 yes"}, rounds=1, seconds=1.0)
    run.measurements = [
        _turn("fastembed, float32", 32, 100, 320),
        _turn("serve all, float32", 32, 250, 128),
        _turn("four processes, float32", 32, 200, 160),
        _turn("llama-cpp --slots 8, float32", 32, 90, 300, TRIALS),
    ]
    run.unavailable = {f"{SECTION}: infinity, float32": "cannot be installed", "vllm": "is not on the PATH"}
    page = write_report(run, tmp_path)
    assert "| **fastembed, float32** | 32 | 100 | 320 |  |  | 0 |  | 2.50 | 2.00 | 0.40 | 0.50 |" in page
    assert "| llama-cpp --slots 8, float32 | 90.0 |  |" in page
    assert "- embeddings: infinity, float32: `cannot be installed`" in page
    assert "- Triton with another back end than Python: `the wheel nvidia-pytriton ships backends/python alone" in page
    again = Run("python -m tests.bench", run.machine, rounds=1, seconds=1.0)
    keep_sections(again, tmp_path, (SECTION,))
    assert not again.measurements
    assert again.unavailable == {"vllm": "is not on the PATH"}
