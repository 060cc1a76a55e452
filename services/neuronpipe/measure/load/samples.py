"""The record of each request: one row of 76 bytes, in the order in which requests ended. Of a text that is generated
also a row of 16 bytes for each part of it, in the order in which they came.
"""

import math
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
        ("first_token_s", "<f4"),  # of a generated text, from when it was due; this and the following as in PartTimes
        ("token_s", "<f4"),
        ("longest_gap_s", "<f4"),
        ("output_tokens", "<u4"),
        ("cached_tokens", "<u4"),  # as in Usage
    ]
)
_PACKED = struct.Struct("<ddffffffIIIIfffII")
_NO_USAGE = (0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
_NO_PARTS = (0.0, 0.0, 0.0, 0, 0)

# A part of a generated text, as it came.
PART = np.dtype(
    [
        ("back_s", "<f8"),  # when it came
        ("gap_s", "<f4"),  # since the part before; of the first one NaN
        ("tokens", "<u4"),
    ]
)
_PACKED_PART = struct.Struct("<dfI")

Rows = NDArray[np.void]


@dataclass
class PartTimes:
    """When the parts of one text came; times in seconds, on the clock of the recorder."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    first_tokens: int = 0
    tokens: int = 0

    def add(self, now_s: float, tokens: int) -> float:
        """Notes a part. Returns the time since the part before; NaN of the first one."""
        gap_s = now_s - self.last_s if self.tokens else math.nan
        if self.tokens:
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        else:
            self.first_s, self.first_tokens = now_s, tokens
        self.tokens += tokens
        self.last_s = now_s
        return gap_s

    @property
    def token_s(self) -> float:
        """The mean time between two tokens after the first part; 0 of a text that came as a whole."""
        later = self.tokens - self.first_tokens
        return (self.last_s - self.first_s) / later if later else 0.0


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
        self._parts = bytearray()
        self._latencies_ms: list[float] = []
        self._errors = 0

    def add_part(self, times: PartTimes, now_s: float, tokens: int) -> None:
        """Records a part of a generated text."""
        self._parts += _PACKED_PART.pack(now_s - self._zero_s, times.add(now_s, tokens), tokens)

    def add_answer(
        self, due_s: float, sent_s: float, now_s: float, response: InferResponse, times: PartTimes | None = None
    ) -> None:
        """Records an answer. `times`: of a text that was read as it came."""
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
            *(_NO_PARTS if times is None else _parts_of(times, usage.cached_tokens)),
        )
        self._latencies_ms.append((now_s - due_s) * 1e3)

    def add_error(self, due_s: float, sent_s: float, now_s: float, outcome: str) -> None:
        """Records a request that ended without an answer, with one of OUTCOMES."""
        times = (due_s - self._zero_s, now_s - due_s, sent_s - due_s)
        self._rows += _PACKED.pack(*times, *_NO_USAGE, OUTCOMES.index(outcome), *_NO_PARTS)
        self._errors += 1

    def tick(self, second: int, in_flight: int) -> Tick:
        """The progress since the last call."""
        tick = Tick(second, self._latencies_ms, self._errors, in_flight)
        self._latencies_ms, self._errors = [], 0
        return tick

    def rows(self) -> Rows:
        """All rows."""
        return np.frombuffer(bytes(self._rows), ROW)

    def parts(self) -> Rows:
        """All parts of generated texts."""
        return np.frombuffer(bytes(self._parts), PART)


def _parts_of(times: PartTimes, cached_tokens: int) -> tuple[float, float, float, int, int]:
    return times.first_s - times.due_s, times.token_s, times.longest_gap_s, times.tokens, cached_tokens
