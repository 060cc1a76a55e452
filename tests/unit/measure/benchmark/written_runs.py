"""Runs that are made up, for tests of what is made of them."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.measure.benchmark.matrix import LATENCY, Cell, Variant
from neuronpipe.measure.benchmark.results import CellResult, Results


def cell(
    batch: int = 1, length: int = 128, *, model: str = "bert-base-uncased", cores: int = 1, mode: str = LATENCY
) -> Cell:
    """A cell of OpenVINO in float32."""
    return Cell(Variant(model, "openvino", "float32", cores), mode, batch, length)


def result(of: Cell, latency_ms: float, *, spread: float = 0.01, calls: int = 100, seed: int = 0) -> CellResult:
    """Latencies around a mean, nearly all of it prediction."""
    samples = np.random.default_rng(seed).normal(latency_ms, latency_ms * spread, calls).tolist()
    return CellResult(
        cell=of,
        latency_ms=samples,
        preprocess_ms=latency_ms * 0.02,
        predict_ms=latency_ms * 0.97,
        postprocess_ms=latency_ms * 0.01,
        tokens=128,
    )


def run(cells: Sequence[CellResult]) -> Results:
    """All cells that were planned."""
    return Results(
        command="neuronpipe benchmark --out x",
        machine={"CPU": "one", "CPUs to use": "2"},
        effort={"warm_up_calls": 10, "calls": 100, "least_calls": 3, "seconds": 4.0, "precision": 0.05},
        models={result.cell.variant.model: {"task": "text_classification", "weights": "random"} for result in cells},
        planned=len(cells),
        minutes=2.0,
        cells=list(cells),
    )
