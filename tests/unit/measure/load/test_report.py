"""measure/load/report.py: the arithmetic, on rows written by hand, and the table."""

import dataclasses
import json
import math
import pickle

import pytest

from neuronpipe.measure.load.generator import Tick
from neuronpipe.measure.load.report import progress_line, table
from neuronpipe.measure.load.request import GenerationLoad, LoadRequest
from tests.unit.measure.load.written_rows import result_of, rows


def test_requests_are_those_due_while_it_was_measured_and_each_is_counted_once() -> None:
    result = result_of(
        rows(
            {"due_s": -0.1},  # warm-up
            {"due_s": 0.0},
            {"due_s": 5.0, "outcome": "OVERLOADED"},
            {"due_s": 5.0, "outcome": "OVERLOADED"},
            {"due_s": 9.0, "outcome": "UNANSWERED"},
            {"due_s": 9.5, "outcome": "NOT_SENT"},
            {"due_s": 10.0},  # after the end
        )
    )
    assert (result.requests, result.answers) == (5, 1)
    assert result.errors == {"OVERLOADED": 2, "UNANSWERED": 1, "NOT_SENT": 1}


def test_throughput_counts_what_came_back_while_it_was_measured() -> None:
    result = result_of(
        rows(
            {"due_s": -2.0, "latency_s": 1.0, "tokens": 1000},  # sent and back in the warm-up
            {"due_s": -1.0, "latency_s": 2.0, "tokens": 20},
            {"due_s": 1.0, "latency_s": 2.0, "tokens": 30},
            {"due_s": 2.0, "latency_s": 2.0, "tokens": 1000, "outcome": "OVERLOADED"},
            {"due_s": 9.0, "latency_s": 2.0, "tokens": 1000},  # back after the end
        )
    )
    # 2 answers and 50 tokens in 10 s; of requests due in them, 2 were answered.
    assert (result.throughput_per_s, result.tokens_per_s, result.answers) == (0.2, 5.0, 2)


def test_goodput_leaves_out_answers_after_their_deadline() -> None:
    found = rows({"due_s": 1.0, "latency_s": 0.1}, {"due_s": 2.0, "latency_s": 0.2}, {"due_s": 3.0, "latency_s": 0.3})
    assert result_of(found, deadline_ms=250.0).goodput_per_s == pytest.approx(0.2)
    assert result_of(found).goodput_per_s == result_of(found).throughput_per_s == pytest.approx(0.3)


def test_offered_rate_is_that_of_the_open_loop() -> None:
    found = rows({"due_s": 1.0}, {"due_s": 2.0, "outcome": "NOT_SENT"}, {"due_s": 11.0})
    assert result_of(found, rate_per_s=5.0).offered_per_s == pytest.approx(0.2)
    assert result_of(found, concurrency=5).offered_per_s is None


def test_latency_is_that_of_answers() -> None:
    result = result_of(
        rows(
            {"due_s": 1.0, "latency_s": 0.1},
            {"due_s": 2.0, "latency_s": 0.3},
            {"due_s": 3.0, "latency_s": 9.0, "outcome": "OVERLOADED"},
        )
    )
    assert result.latency_ms is not None
    found = (result.latency_ms.p50, result.latency_ms.max, result.latency_ms.mean)
    assert found == pytest.approx((200.0, 300.0, 200.0))


_TIMES = {"total_ms": 15.0, "preprocess_ms": 1.0, "queue_ms": 4.0, "compute_ms": 6.0, "postprocess_ms": 2.0}


def test_stages_sum_to_the_latency() -> None:
    result = result_of(rows({"latency_s": 0.02, **_TIMES}))
    # 15 - (1 + 4 + 6 + 2) = 2 in the gateway and on the hops, 20 - 15 = 5 outside.
    assert {name: found.p50 for name, found in result.stages_ms.items()} == pytest.approx(
        {"preprocess": 1.0, "queue": 4.0, "compute": 6.0, "postprocess": 2.0, "gateway_and_hops": 2.0, "outside": 5.0}
    )


def test_padding_ratio_and_batch_sizes_are_those_of_answers() -> None:
    result = result_of(
        rows(
            {"tokens": 30, "padded_tokens": 40, "batch_size": 1},
            {"tokens": 10, "padded_tokens": 40, "batch_size": 4},
            {"tokens": 10, "padded_tokens": 20, "batch_size": 4},
            {"outcome": "OVERLOADED"},
        )
    )
    # (40 - 30 + 40 - 10 + 20 - 10) / 100; (1 + 4 + 4) / 3.
    assert result.padding_ratio == pytest.approx(0.5)
    assert (result.batch_size_mean, result.batch_sizes) == (3.0, {1: 1, 4: 2})


def test_a_gateway_that_does_not_tell_its_padding_has_no_ratio() -> None:
    assert result_of(rows({"tokens": 30})).padding_ratio is None


def test_many_tokens_do_not_overflow() -> None:
    result = result_of(rows(*[{"tokens": 3_000_000_000, "padded_tokens": 4_000_000_000}] * 4))
    assert result.padding_ratio == pytest.approx(0.25)
    assert result.tokens_per_s == 1.2e9


def test_nothing_measured_is_no_error() -> None:
    result = result_of(rows(), measured_s=0.0)
    assert (result.requests, result.throughput_per_s) == (0, 0)
    assert (result.latency_ms, result.batch_size_mean, result.padding_ratio) == (None, None, None)
    assert (result.stages_ms, result.errors) == ({}, {})


def test_a_busy_generator_is_warned_of() -> None:
    (warning,) = result_of(rows(), cpu_shares=(0.5, 0.91), concurrency=2, processes=2).warnings
    assert warning.startswith("generator process 2 of 2 used 0.91 of a CPU core (limit 0.9)")


def test_late_sends_are_warned_of() -> None:
    (warning,) = result_of(rows({"lag_s": 0.011}), rate_per_s=1.0).warnings
    assert warning.startswith("requests were sent late: by 11.0 ms at the 99th percentile (limit 10 ms)")


def test_a_generator_within_its_limits_is_not_warned_of() -> None:
    result = result_of(rows({"lag_s": 0.009}, {"lag_s": 5.0, "outcome": "NOT_SENT"}), cpu_shares=(0.9,), rate_per_s=1.0)
    assert result.warnings == []


def test_result_survives_pickle_and_becomes_json() -> None:
    result = result_of(rows({"latency_s": 0.5, "batch_size": 2}), rate_per_s=1.0)
    assert pickle.loads(pickle.dumps(result)) == result
    decoded = json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))
    assert (decoded["latency_ms"]["p50"], decoded["batch_sizes"]) == (500.0, {"2": 1})


_TEXT = {"due_s": 1.0, "latency_s": 3.0, "tokens": 10, "output_tokens": 4}


def test_goodput_of_texts_is_within_both_limits() -> None:
    found = rows(
        {**_TEXT, "first_token_s": 0.5, "token_s": 0.05},
        {**_TEXT, "first_token_s": 1.5, "token_s": 0.05},  # its first token is late
        {**_TEXT, "first_token_s": 0.5, "token_s": 0.2},  # its others are slow
        {**_TEXT, "first_token_s": 0.5, "token_s": 0.05, "outcome": "OVERLOADED"},
    )
    load = GenerationLoad(first_token_limit_ms=1000.0, token_limit_ms=100.0)
    result = result_of(found, generation=load)
    assert (result.answers, result.answers_in_time) == (3, 1)
    assert result.goodput_per_s == pytest.approx(0.1)
    assert result_of(found, generation=load, deadline_ms=2000.0).answers_in_time == 0


def test_tokens_count_when_they_come() -> None:
    parts = [(-0.5, math.nan, 100), (0.5, 0.01, 1), (1.0, 0.03, 2), (10.5, 0.9, 100)]
    found = result_of(rows({**_TEXT, "cached_tokens": 4}), parts=parts, generation=GenerationLoad()).generation
    assert found is not None
    assert found.inter_token_ms is not None
    assert found.cached_ratio is not None
    assert found.output_tokens_per_s == pytest.approx(0.3)
    assert found.inter_token_ms.max == pytest.approx(30.0)
    assert found.cached_ratio == pytest.approx(0.4)


def test_a_text_that_came_as_a_whole_has_no_time_per_token() -> None:
    found = result_of(rows({**_TEXT, "first_token_s": 3.0}), generation=GenerationLoad()).generation
    assert found is not None
    assert (found.per_token_ms, found.longest_gap_ms, found.inter_token_ms) == (None, None, None)
    assert found.first_token_ms is not None


def test_whole_answers_have_no_figures_of_texts() -> None:
    assert result_of(rows(_TEXT)).generation is None


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
    answer = {"due_s": 1.0, "latency_s": 0.0205, **_TIMES, "tokens": 30, "padded_tokens": 40, "batch_size": 4}
    found = rows(answer, {"due_s": 2.0, "outcome": "OVERLOADED"})
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
    last = table(result_of(rows(), cpu_shares=(0.95,))).splitlines()[-1]
    assert last.startswith("WARNING: generator process 1 of 1 used 0.95")


def test_a_run_without_answers_says_so() -> None:
    assert "no request was answered" in table(result_of(rows({"outcome": "UNAVAILABLE"})))


def test_texts_that_are_in_no_batch_have_no_batch_size() -> None:
    assert "batch size" not in table(result_of(rows({"latency_s": 0.5, "batch_size": 0})))


def test_a_run_that_was_broken_off_says_so() -> None:
    assert "broken off" in table(result_of(rows(), measured_s=0.0, is_broken_off=True))
