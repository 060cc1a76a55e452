"""Other systems with the graph of ours: what counts as a right answer, and which of them a ratio is to."""

from pathlib import Path

import pytest

from tests.bench.against_peers import LIKE_FOR_LIKE as SECTION
from tests.bench.against_peers import TRIALS, wrong_answer
from tests.bench.measurements import Measurement, Measurements
from tests.bench.report import Run, keep_sections, write_report
from tests.bench.targets import check_targets

_EXPECTED = [("calm", 0.9), ("busy", 0.6)]


@pytest.mark.parametrize(
    ("answers", "is_ordered", "wrong"),
    [
        ([("calm", 0.88), ("busy", 0.62)], True, ""),
        # A text in the middle may have either label.
        ([("calm", 0.9), ("busy", 0.58)], True, ""),
        ([("busy", 0.6), ("calm", 0.9)], False, ""),
        ([("busy", 0.6), ("calm", 0.9)], True, "probability 0.600 of 'busy' instead of 0.100"),
        ([("busy", 0.9), ("busy", 0.6)], True, "probability 0.900 of 'busy' instead of 0.100"),
        ([("calm", 0.9)], True, "1 answers to 2 texts"),
    ],
)
def test_an_answer_is_wrong_by_its_probability(answers: list[tuple[str, float]], is_ordered: bool, wrong: str) -> None:
    assert wrong_answer(answers, _EXPECTED, is_ordered=is_ordered) == wrong


def _turn(
    system: str, callers: int, rate: float, median_ms: float, round: int = 0, section: str = SECTION
) -> Measurement:
    latencies_ms = {"p50": median_ms, "p90": median_ms, "p99": median_ms}
    return Measurement(
        section=section, system=system, callers=callers, round=round, throughput_per_s=rate, latencies_ms=latencies_ms
    )


def _turns() -> list[Measurement]:
    """int8: ours in the rounds of a peer that is best with 32 callers, and of one that is best with one."""
    turns = [_turn("ray a, float32", 32, 999, 0.001)]
    for round, peer, rate, median_ms in ((0, "litserve a, int8", 100.0, 8.0), (1, "triton b, int8", 50.0, 4.0)):
        for callers in (1, 32):
            turns.append(_turn(peer, callers, rate, median_ms, round))
            turns.append(_turn("serve all, int8", callers, 230.0 + round, 2.0, round))
            turns.append(_turn("four processes, int8", callers, 210.0, 3.0, round))
    return [*turns, _turn("litserve c, int8", 32, 77, 9, section=TRIALS)]


def test_the_best_peer_has_the_dtype_of_ours_and_is_another_one_for_each_figure() -> None:
    targets = {target.name: target for target in check_targets(Measurements(_turns()))}
    many = targets["serve all, int8, 32 callers: throughput to the best peer's with the same graph (litserve a, int8)"]
    target = targets["serve all, int8, 1 callers: p50 to the best peer's with the same graph (triton b, int8)"]
    assert (many.measured and many.measured.median, many.is_met) == (2.3, True)
    assert (target.measured and target.measured.median, target.is_met) == (0.5, True)


def test_the_page_has_like_for_like_before_the_others_and_measures_it_with_the_models(tmp_path: Path) -> None:
    run = Run("python -m tests.bench", {"instructions": "AVX2 yes"}, rounds=1, seconds=1.0)
    others = (_turn("serve all, int8", 32, 200, 5, section="models"), _turn("ray", 32, 50, 5, section="peers"))
    run.measurements = [*_turns(), *others]
    run.unavailable = {f"{SECTION}: ray a, int8": "cannot be installed", "tei": "is not on the PATH"}
    page = write_report(run, tmp_path)
    assert page.index("like for like") < page.index("## MiniLM") < page.index("as people write them")
    assert "| **litserve a, int8** | 32 | 100 | 8.00 | 8.00 | 8.00 | 0 |  | 2.30 | 2.10 | 0.25 | 0.38 |" in page
    assert "| litserve c, int8 | 77.0 |  |" in page
    again = Run("python -m tests.bench", run.machine, rounds=1, seconds=1.0)
    keep_sections(again, tmp_path, ("models",))
    assert {measurement.section for measurement in again.measurements} == {"peers"}
    assert again.unavailable == {"tei": "is not on the PATH"}
