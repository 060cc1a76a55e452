"""report.py: every figure is there, with its unit."""

from neuronpipe.measure.load.report import progress_line, table
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import Tick
from tests.unit.measure.load.results import result_of, rows

_REQUEST = LoadRequest(target="h:1", model="m", concurrency=2, duration_s=2.0, warm_up_s=1.0)


def test_a_second_of_several_processes_is_one_line() -> None:
    line = progress_line(_REQUEST, [Tick(2, [1.0, 3.0], 1, 4), Tick(2, [2.0], 2, 5)])
    assert line.split() == ["2", "s", "3", "requests/s", "3", "errors", "p50", "2.00", "ms", "9", "in", "flight"]


def test_a_line_tells_its_phase() -> None:
    phases = [progress_line(_REQUEST, [Tick(second, [], 0, 0)]).split()[-1] for second in (1, 2, 3, 4)]
    assert phases == ["warm-up", "flight", "flight", "waiting"]


def test_a_second_without_answers_has_no_percentile() -> None:
    assert "p50          -" in progress_line(_REQUEST, [Tick(1, [], 3, 2)])


def test_the_table_has_every_figure() -> None:
    answer = {
        "due_s": 1.0,
        "latency_s": 0.0205,
        "total_ms": 15.0,
        "preprocess_ms": 1.0,
        "queue_ms": 4.0,
        "compute_ms": 6.0,
    }
    usage = {"postprocess_ms": 2.0, "tokens": 30, "padded_tokens": 40, "batch_size": 4}
    found = rows({**answer, **usage}, {"due_s": 2.0, "outcome": "OVERLOADED"})
    lines = table(result_of(found, rate_per_s=0.2, deadline_ms=50.0, priority="bulk")).splitlines()
    words = [line.split() for line in lines]

    assert "0.2 requests/s at random times, deadline 50 ms, priority bulk" in lines[0]
    assert lines[1] == "measured for 10.0 s after 1 s of warm-up"
    # 2 due, 1 answered, 30 tokens in 10 s.
    assert ["offered", "0.2", "requests/s"] in words
    assert ["throughput", "0.1", "requests/s"] in words
    assert ["goodput", "0.1", "requests/s"] in words
    assert ["tokens", "3", "tokens/s"] in words
    assert ["requests", "2", "answered", "1,", "errors", "1"] in words
    assert ["OVERLOADED", "1", "(50.0%)"] in words
    assert ["latency", *["20.50"] * 6] in words
    assert ["predict:", "queue", *["4.00"] * 6] in words
    assert ["outside", "the", "gateway", *["5.50"] * 6] in words
    assert "padding      25.0% of what was computed" in lines
    assert ["4", "100.0%", "#" * 40] in words
    assert lines[-1] == "generator    0.50 of a CPU core; sent late by 0.00 ms (p50), 0.00 ms (p99)"


def test_a_closed_loop_has_callers_and_no_offered_rate() -> None:
    found = table(result_of(rows(), concurrency=3))
    assert "3 callers in turn" in found
    assert "offered" not in found


def test_warnings_stand_at_the_end() -> None:
    assert (
        table(result_of(rows(), cpu_shares=(0.95,)))
        .splitlines()[-1]
        .startswith("WARNING: generator process 1 of 1 used 0.95")
    )


def test_a_run_without_answers_says_so() -> None:
    assert "no request was answered" in table(result_of(rows({"outcome": "UNAVAILABLE"})))


def test_texts_that_are_in_no_batch_have_no_batch_size() -> None:
    assert "batch size" not in table(result_of(rows({"latency_s": 0.5, "batch_size": 0})))


def test_a_run_that_was_broken_off_says_so() -> None:
    assert "broken off" in table(result_of(rows(), measured_s=0.0, is_broken_off=True))
