"""generator.py, Recorder: rows hold what responses say, in the units of their names."""

import numpy as np

from neuronpipe.api.v1.inference_pb2 import InferResponse, StageTimings, Usage
from neuronpipe.measure.load.generator import OUTCOMES, ROW, PartTimes, Recorder

_MS = 1_000_000


def test_a_row_holds_the_response_in_milliseconds() -> None:
    timings = StageTimings(
        total_ns=9 * _MS,
        preprocess_ns=1 * _MS,
        predict_ns=6 * _MS,
        postprocess_ns=_MS // 2,
        predict_queue_ns=2 * _MS,
        predict_compute_ns=3 * _MS,
    )
    recorder = Recorder(zero_s=100.0)
    recorder.add_answer(
        101.5, 101.75, 102.0, InferResponse(timings=timings, usage=Usage(tokens=33, padded_tokens=40, batch_size=4))
    )

    (row,) = recorder.rows()
    assert {name: row[name].item() for name in ROW.names or ()} == {
        "due_s": 1.5,
        "latency_s": 0.5,
        "lag_s": 0.25,
        "total_ms": 9.0,
        "preprocess_ms": 1.0,
        "predict_ms": 6.0,
        "queue_ms": 2.0,
        "compute_ms": 3.0,
        "postprocess_ms": 0.5,
        "tokens": 33,
        "padded_tokens": 40,
        "batch_size": 4,
        "outcome": OUTCOMES.index("OK"),
        "first_token_s": 0.0,
        "token_s": 0.0,
        "longest_gap_s": 0.0,
        "output_tokens": 0,
        "cached_tokens": 0,
    }


def test_a_text_that_came_in_parts_has_their_times() -> None:
    recorder = Recorder(zero_s=100.0)
    times = PartTimes(due_s=101.0)
    for now_s, tokens in ((101.25, 2), (101.5, 1), (102.25, 3)):
        recorder.add_part(times, now_s, tokens)
    recorder.add_answer(101.0, 101.0, 102.5, InferResponse(usage=Usage(tokens=9, cached_tokens=4)), times)

    (row,) = recorder.rows()
    names = ("first_token_s", "token_s", "longest_gap_s", "output_tokens", "cached_tokens")
    # 4 tokens came in the second after the first part.
    assert [row[name].item() for name in names] == [0.25, 0.25, 0.75, 6, 4]
    parts = recorder.parts()
    assert (parts["back_s"].tolist(), parts["tokens"].tolist()) == ([1.25, 1.5, 2.25], [2, 1, 3])
    assert np.isnan(parts["gap_s"][0])
    assert parts["gap_s"][1:].tolist() == [0.25, 0.75]


def test_an_error_is_a_row_of_its_own() -> None:
    recorder = Recorder(zero_s=100.0)
    recorder.add_error(99.0, 99.5, 100.0, "OVERLOADED")

    (row,) = recorder.rows()
    assert (row["due_s"], row["latency_s"], row["lag_s"], OUTCOMES[row["outcome"]]) == (-1.0, 1.0, 0.5, "OVERLOADED")


def test_a_tick_tells_what_came_since_the_last() -> None:
    recorder = Recorder(zero_s=0.0)
    recorder.add_answer(1.0, 1.0, 1.25, InferResponse())
    recorder.add_error(1.0, 1.0, 1.5, "OVERLOADED")
    first = recorder.tick(1, in_flight=7)
    second = recorder.tick(2, in_flight=0)

    assert (first.second, list(first.latencies_ms), first.errors, first.in_flight) == (1, [250.0], 1, 7)
    assert (second.second, list(second.latencies_ms), second.errors, second.in_flight) == (2, [], 0, 0)
    assert len(recorder.rows()) == 2
