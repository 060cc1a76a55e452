"""`neuronpipe accept` measures a back end on this machine and writes one folder, also of what goes wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_COLUMNS = "| Model | Back end | dtype | Shape | Cores | In flight | Throughput /s | p50 ms | p95 ms | p99 ms | Cost per 1M |"


def _accept(source: Path, out: Path, *options: str, environment: Mapping[str, str] | None = None) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "neuronpipe", "accept", str(source), "--task", "text-classification", "--out", str(out)]
    shapes = ("--bucket", "1x16", "--bucket", "4x16", "--seconds", "0.2", "--price-per-hour", "0.7582")
    run = subprocess.run(
        [*command, *shapes, *options], capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{out}/report.md\n"
    return json.loads((out / "report.json").read_text())["models"][0], (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("backend", "measured"),
    [("openvino", [("1x16", 1), ("4x16", 1)]), ("torch", [("1x16", 1), ("1x16", 2), ("4x16", 1), ("4x16", 2)])],
)
def test_a_back_end_is_measured_at_every_shape(
    backend: str, measured: list[tuple[str, int]], sources: dict[str, Path], tmp_path: Path
) -> None:
    model, text = _accept(sources["classifier"], tmp_path / "report", "--backend", backend)
    assert [(figures["shape"], figures["in_flight"]) for figures in model["figures"]] == measured
    for figures in model["figures"]:
        assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
        # The price of an hour by the sequences of an hour, times a million.
        assert figures["cost_per_million"] == pytest.approx(0.7582e6 / 3600 / figures["throughput_per_s"], rel=1e-2, abs=1e-4)
    assert model["cores_agree"]
    assert model["accuracy"]["agreement"] == 1.0
    assert model["errors"] == {}
    assert _COLUMNS in text
    assert "double" not in text


def test_on_neuron_one_and_two_in_flight_are_measured_and_error_texts_are_captured(
    neuron_double: Mapping[str, str], sources: dict[str, Path], tmp_path: Path
) -> None:
    environment = {**neuron_double, "NEURON_DOUBLE_FOLDER": str(tmp_path / "neuron"), "HOME": str(tmp_path)}
    model, text = _accept(sources["classifier"], tmp_path / "report", "--backend", "neuronx", "--cores", "0-1", environment=environment)
    assert [(figures["shape"], figures["in_flight"]) for figures in model["figures"]] == [
        ("1x16", 1),
        ("1x16", 2),
        ("4x16", 1),
        ("4x16", 2),
    ]
    assert model["cores"] == 2
    assert set(model["errors"]) == {"a shape that was not compiled", "another shape", "another dtype", "an input too few"}
    assert "Incorrect tensor shape at input #0: received 1 15, expected 1 16" in " ".join(model["errors"]["another shape"].split())
    assert not any("NOT REFUSED" in error for error in model["errors"].values())
    assert "**This report was made on the contract double of the Neuron SDK: its times say nothing of Neuron.**" in text


def test_what_cannot_be_set_up_is_in_the_report(sources: dict[str, Path], tmp_path: Path) -> None:
    model, text = _accept(sources["classifier"], tmp_path / "report", "--backend", "openvino", "--dtype", "float16")
    assert model["errors"]["setup"].startswith("dtype 'float16' is not known for openvino")
    assert "error text, setup: `dtype 'float16'" in text
