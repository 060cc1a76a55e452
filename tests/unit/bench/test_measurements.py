"""What a benchmark's page says, from turns that are made up here."""

from pathlib import Path
from typing import Any

from tests.bench.ceiling import cut_sorted
from tests.bench.measurements import Measurement, Measurements, Spread, p50, throughput
from tests.bench.report import Run, write_report
from tests.bench.targets import best_peer, check_targets


def _turn(
    system: str, round: int, rate: float, callers: int = 32, section: str = "models", median_ms: float = 1.0
) -> Measurement:
    latencies_ms = {"p50": median_ms, "p90": 2.0, "p99": 3.0}
    figures = {"padding": 0.05}
    turn: Any = {"section": section, "system": system, "callers": callers, "round": round}
    return Measurement(**turn, throughput_per_s=rate, latencies_ms=latencies_ms, figures=figures)


def test_a_ratio_is_of_turns_of_the_same_round() -> None:
    # The machine was twice as fast in round 1; round 2 has no reference.
    turns = [
        _turn("ours", 0, 50),
        _turn("other", 0, 100),
        _turn("ours", 1, 150),
        _turn("other", 1, 200),
        _turn("ours", 2, 999),
    ]
    assert Measurements(turns).ratio("models", "ours", "other", 32, throughput) == Spread(0.625, 0.5, 0.75, 2)


def test_the_reference_may_have_no_callers() -> None:
    turns = [_turn("ours", 0, 90), _turn("ceiling", 0, 100, callers=0)]
    found = Measurements(turns).ratio("models", "ours", "ceiling", 32, throughput, reference_callers=0)
    assert found == Spread(0.9, 0.9, 0.9, 1)


def test_a_target_is_met_by_the_median() -> None:
    turns = [_turn("serve all, int8", round, rate) for round, rate in enumerate((80, 86, 90))]
    turns += [_turn("back end alone, int8", round, 100, callers=0) for round in range(3)]
    targets = {target.name: target for target in check_targets(Measurements(turns))}
    assert targets["serve all, int8, 32 callers: throughput of the back end's alone"].is_met
    assert targets["four processes, int8, 32 callers: throughput of the back end's alone"].is_met is None


def test_the_best_peer_is_another_one_for_each_figure() -> None:
    turns = [_turn("quick", 0, 10, section="peers", median_ms=1), _turn("wide", 0, 20, section="peers", median_ms=2)]
    turns.append(_turn("serve all, float32", 0, 99, section="peers", median_ms=0.1))
    found = Measurements(turns)
    assert best_peer(found, 32, throughput, is_high=True) == "wide"
    assert best_peer(found, 32, p50, is_high=False) == "quick"


def test_batches_of_the_ceiling_keep_to_their_budget() -> None:
    # Padded to steps of 4: 4, 8 and 8, 12; two of 8 make 16, which the budget takes, and three of 12 make 36, which it
    # does not.
    assert list(cut_sorted([9, 7, 3, 5], budget=24)) == [([2, 3, 1], 8), ([0], 12)]
    assert [rows for rows, _ in cut_sorted([9, 7, 3], budget=0)] == [[2], [1], [0]]


def test_a_turn_without_answers_counts_for_what_it_tells(tmp_path: Path) -> None:
    silent = Measurement(section="models", system="serve all, int8", callers=32, round=0, throughput_per_s=0, errors=9)
    found = Measurements([silent, _turn("serve all, int8", 1, 90)])
    assert found.spread("models", "serve all, int8", 32, throughput) == Spread(45, 0, 90, 2)
    assert found.spread("models", "serve all, int8", 32, p50) == Spread(1, 1, 1, 1)
    # And leaves a page to be written.
    page = write_report(Run("command", {}, 2, 1.0, found.all), tmp_path)
    assert "| serve all, int8 | 32 | 45.0 (0.00 – 90.0) | 1.00 |" in page
