"""Rows written by hand, and the result of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronpipe.measure.load.generator import OUTCOMES, PART, ROW, Rows
from neuronpipe.measure.load.report import LoadResult, compute_result
from neuronpipe.measure.load.request import LoadRequest


def rows(*values: dict[str, Any]) -> Rows:
    """Rows that are answers and zero but for what is given; `outcome` is a word of OUTCOMES."""
    made = np.zeros(len(values), ROW)
    for row, given in zip(made, values, strict=True):
        for name, value in given.items():
            row[name] = OUTCOMES.index(value) if name == "outcome" else value
    return made


def result_of(
    found: Rows,
    *,
    measured_s: float = 10.0,
    parts: Sequence[tuple[float, float, int]] = (),
    cpu_shares: Sequence[float] = (0.5,),
    is_broken_off: bool = False,
    **changes: Any,
) -> LoadResult:
    """What compute_result makes of rows, and of parts (when, gap, tokens), for a closed loop unless `changes` of the
    request say otherwise.
    """
    request = LoadRequest(target="h:1", model="m", **changes)
    return compute_result(
        request,
        version="1",
        task="sentence_embedding",
        rows=found,
        parts=np.array([*parts], PART),
        cpu_shares=cpu_shares,
        measured_s=measured_s,
        is_broken_off=is_broken_off,
    )
