"""The record of each request: one row of 56 bytes, in the order in which requests ended."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.core.status import CODES

OK = "OK"
NOT_SENT = "NOT_SENT"
UNANSWERED = "UNANSWERED"
# The outcomes of a request: an answer, the reason of a NeuronpipeError, or an outcome that only the generator knows.
OUTCOMES = (OK, *(kind.reason for kind in CODES), NOT_SENT, UNANSWERED)

# Times in seconds count from the start of what is measured: requests of the warm-up have negative ones.
ROW = np.dtype(
    [
        ("due_s", "<f8"),  # when it was due
        ("latency_s", "<f8"),  # from then to the answer or the error
        ("lag_s", "<f4"),  # from then until it was sent
        ("total_ms", "<f4"),  # this and the following as in StageTimings
        ("preprocess_ms", "<f4"),
        ("queue_ms", "<f4"),
        ("compute_ms", "<f4"),
        ("postprocess_ms", "<f4"),
        ("tokens", "<u4"),  # this and the following as in Usage
        ("padded_tokens", "<u4"),
        ("batch_size", "<u4"),
        ("outcome", "<u4"),  # index into OUTCOMES
    ]
)
_PACKED = struct.Struct("<ddffffffIIII")
_NO_USAGE = (0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)

Rows = NDArray[np.void]


@dataclass(frozen=True)
class Tick:
    """The progress since the last tick."""

    second: int
    latencies_ms: Sequence[float]
    errors: int
    in_flight: int


class Recorder:
    """Keeps a row for every request of one process."""

    def __init__(self, zero_s: float) -> None:
        """`zero_s`: the start of what is measured, on the clock of the times that the other methods take."""
        self._zero_s = zero_s
        self._rows = bytearray()
        self._latencies_ms: list[float] = []
        self._errors = 0

    def add_answer(self, due_s: float, sent_s: float, now_s: float, response: InferResponse) -> None:
        """Records an answer."""
        timings, usage = response.timings, response.usage
        self._rows += _PACKED.pack(
            due_s - self._zero_s,
            now_s - due_s,
            sent_s - due_s,
            timings.total_ns / 1e6,
            timings.preprocess_ns / 1e6,
            timings.predict_queue_ns / 1e6,
            timings.predict_compute_ns / 1e6,
            timings.postprocess_ns / 1e6,
            usage.tokens,
            usage.padded_tokens,
            usage.batch_size,
            0,
        )
        self._latencies_ms.append((now_s - due_s) * 1e3)

    def add_error(self, due_s: float, sent_s: float, now_s: float, outcome: str) -> None:
        """Records a request that ended without an answer, with one of OUTCOMES."""
        self._rows += _PACKED.pack(
            due_s - self._zero_s, now_s - due_s, sent_s - due_s, *_NO_USAGE, OUTCOMES.index(outcome)
        )
        self._errors += 1

    def tick(self, second: int, in_flight: int) -> Tick:
        """The progress since the last call."""
        tick = Tick(second, self._latencies_ms, self._errors, in_flight)
        self._latencies_ms, self._errors = [], 0
        return tick

    def rows(self) -> Rows:
        """All rows."""
        return np.frombuffer(bytes(self._rows), ROW)
