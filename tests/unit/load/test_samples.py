"""samples.py: rows hold what responses say, in the units of their names."""

from neuronpipe.api.v1.inference_pb2 import InferResponse, StageTimings, Usage
from neuronpipe.load.samples import OUTCOMES, ROW, Recorder

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
        "queue_ms": 2.0,
        "compute_ms": 3.0,
        "postprocess_ms": 0.5,
        "tokens": 33,
        "padded_tokens": 40,
        "batch_size": 4,
        "outcome": OUTCOMES.index("OK"),
    }


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
