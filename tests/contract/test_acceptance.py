"""`neuronpipe accept` measures a back end on this machine and writes one folder, also of what goes wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.models.decoders import save_decoder
from tests.models.encoder_decoders import save_encoder_decoder

pytestmark = pytest.mark.long

_COLUMNS = (
    "| Model | Back end | dtype | Shape | Cores | In flight | Throughput /s | p50 ms | p95 ms | p99 ms | Cost per 1M |"
)


def _run(
    *arguments: object, task: str = "text-classification", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neuronpipe", "accept", *map(str, arguments), "--task", task]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )


def _accept(
    sources: Sequence[Path], out: Path, *options: str, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    shapes = ("--bucket", "1x16", "--bucket", "4x16", "--seconds", "0.2", "--price-per-hour", "0.7582")
    run = _run(*sources, "--out", out, *shapes, *options, environment=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{out}/report.md\n"
    return json.loads((out / "report.json").read_text())["models"], (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("backend", "measured"),
    [("openvino", [("1x16", 1), ("4x16", 1)]), ("torch", [("1x16", 1), ("1x16", 2), ("4x16", 1), ("4x16", 2)])],
)
def test_a_back_end_is_measured_at_every_shape(
    backend: str, measured: list[tuple[str, int]], sources: dict[str, Path], tmp_path: Path
) -> None:
    (model,), text = _accept([sources["classifier"]], tmp_path / "report", "--backend", backend)
    assert [(figures["shape"], figures["in_flight"]) for figures in model["figures"]] == measured
    for figures in model["figures"]:
        assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
        # The price of an hour by the sequences of an hour, times a million.
        assert figures["cost_per_million"] == pytest.approx(
            0.7582e6 / 3600 / figures["throughput_per_s"], rel=1e-2, abs=1e-4
        )
    # The loaded back end itself with PyTorch float32, on all cores of it.
    assert model["parity"]["cores"] == model["cores"]
    assert model["parity"]["texts"] > 100
    assert 0 < model["parity"]["largest_difference"] < 1e-4
    assert model["parity"]["agreement"] == 1.0
    assert model["errors"] == {}
    assert _COLUMNS in text
    assert "double" not in text


_NEURONX = ("--backend", "neuronx")


@pytest.fixture
def machine(neuron_double: Mapping[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with one device of two cores."""
    folder = tmp_path / "neuron"
    folder.mkdir()
    places = {"NEURON_DOUBLE_FOLDER": str(folder), "NEURON_DOUBLE_LOG": str(tmp_path / "log"), "HOME": str(tmp_path)}
    return {**neuron_double, **places}


def test_on_neuron_every_model_has_all_cores_and_what_the_sdk_says_is_captured(
    machine: dict[str, str], sources: dict[str, Path], tmp_path: Path
) -> None:
    served = [sources["classifier"], sources["multi-label"]]
    models, text = _accept(served, tmp_path / "report", *_NEURONX, "--cores", "0-1", environment=machine)
    for model in models:
        measured = [("1x16", 1), ("1x16", 2), ("4x16", 1), ("4x16", 2)]
        assert [(figures["shape"], figures["in_flight"]) for figures in model["figures"]] == measured
        assert model["errors"] == {}
        assert (model["cores"], model["parity"]["cores"]) == (2, 2)
        assert model["parity"]["largest_difference"] < 5e-5
        refusals = model["refusals"]
        assert "Incorrect tensor shape at input #0: received 1 15, expected 1 16" in " ".join(
            refusals["another shape"].split()
        )
        assert "status=1006" in refusals["a token id beyond the vocabulary"]
        assert set(refusals) >= {"a shape that was not compiled, of us", "another dtype", "an input too few"}
        assert not any("NOT REFUSED" in error for error in refusals.values())
    assert "**This report was made on the contract double of the Neuron SDK: its times say nothing of Neuron.**" in text
    assert "| classifier | neuronx, the double | float32 | 1x16 | 2 | 1 |" in text
    assert (
        "- refused, another shape: `RuntimeError: RuntimeError: Incorrect tensor shape at input #0: received 1 15, "
        "expected 1 16`" in text
    )
    assert "$" not in text  # what a double takes costs nothing on Neuron
    # Everything was compiled before anything was measured, and each model's process ended before the next one took its
    # cores.
    events = [line.split(" ")[:2] for line in Path(machine["NEURON_DOUBLE_LOG"]).read_text().splitlines()]
    kinds = [event for _, event in events]
    assert kinds.index("load") > len(kinds) - 1 - kinds[::-1].index("compile")
    assert len(dict.fromkeys(pid for pid, event in events if event == "load")) == 2


@pytest.mark.long
def test_a_model_in_parts_is_measured_over_its_cores(
    machine: dict[str, str], sources: dict[str, Path], tmp_path: Path
) -> None:
    options = ("--backend", "neuronx", "--cores", "2", "--pipeline-cores", "2")
    (model,), _ = _accept([sources["classifier"]], tmp_path / "report", *options, environment=machine)
    assert model["errors"] == {}
    assert (model["cores"], len(model["figures"])) == (2, 4)
    assert model["parity"]["largest_difference"] < 5e-5


@pytest.mark.parametrize(
    ("backend", "family", "bucket", "most"),
    [
        ("openvino", "llama", "4x48", 4),
        ("torch", "gpt2", "4x48", 4),
        ("neuronx", "llama", "4x48", 4),
        # One slot has the source.
        ("neuronx", "bart", "6x48", 5),
    ],
)
def test_a_model_that_generates_is_measured_alone_and_with_as_many_texts_as_fit(
    backend: str, family: str, bucket: str, most: int, machine: dict[str, str], tmp_path: Path
) -> None:
    save = save_decoder if family in ("llama", "gpt2") else save_encoder_decoder
    task = "text-generation" if save is save_decoder else "summarization"
    source, out = save(family, tmp_path / family), tmp_path / "report"
    options = ("--backend", backend, "--bucket", bucket, "--seconds", "0.3", "--cores", "1", "--price-per-hour", "2")
    run = _run(source, "--out", out, *options, task=task, environment=machine)
    assert run.returncode == 0, run.stderr
    (model,), text = json.loads((out / "report.json").read_text())["models"], (out / "report.md").read_text()
    assert model["errors"] == {}
    assert [(figure["shape"], figure["in_flight"]) for figure in model["figures"]] == [(bucket, 1), (bucket, most)]
    for figures in model["figures"]:
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
        # A step is a token of each text.
        assert figures["throughput_per_s"] > 0.5 * figures["in_flight"] * 1000 / figures["p99_ms"]
        assert figures["prompt_tokens_per_s"] > 0
    parity = model["parity"]
    assert (parity["texts"], parity["cores"], parity["agreement"]) == (6, 1, 1.0)
    assert 0 < parity["largest_difference"] <= 1e-4 * parity["largest_output"]
    assert f"- prompts at {bucket}, {most} in flight: " in text


def test_a_text_longer_than_the_model_is_in_the_report(tmp_path: Path) -> None:
    source, out = save_decoder("gpt2", tmp_path / "gpt2"), tmp_path / "report"
    options = ("--backend", "torch", "--bucket", "1x100000", "--bucket", "1x16", "--seconds", "0.1")
    assert _run(source, "--out", out, *options, task="text-generation").returncode == 0
    (model,) = json.loads((out / "report.json").read_text())["models"]
    assert "100000 tokens, the model takes " in model["errors"]["1x100000"]
    assert [figure["shape"] for figure in model["figures"]] == ["1x16"]


def test_a_model_that_fails_is_in_the_report_and_the_next_one_is_measured(
    machine: dict[str, str], sources: dict[str, Path], tmp_path: Path
) -> None:
    # After this many executions the process that measures is killed, as the first bad input may kill a runtime.
    machine["NEURON_DOUBLE_KILL_AFTER"] = "60"
    asked = [tmp_path / "nothing", sources["classifier"]]
    (missing, killed), text = _accept(asked, tmp_path / "report", *_NEURONX, "--cores", "1", environment=machine)
    assert missing["errors"]["compile"].endswith("nothing: no such folder")
    assert killed["errors"]["measure"].startswith("the process ended with signal SIGKILL")
    # What was known before is kept.
    assert killed["parity"]["agreement"] == 1.0
    assert "**failed**, compile: `" in text


def test_a_lost_core_is_in_the_report(machine: dict[str, str], sources: dict[str, Path], tmp_path: Path) -> None:
    (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-0").write_text("101")
    options = (*_NEURONX, "--cores", "1")
    (model,), _ = _accept([sources["classifier"]], tmp_path / "report", *options, environment=machine)
    assert "CoreLost: core 0 was lost" in model["errors"]["compare"]
    assert "CoreLost" in model["errors"]["4x16, 2 in flight"]
    assert "parity" not in model


def test_what_cannot_be_compiled_is_in_the_report(sources: dict[str, Path], tmp_path: Path) -> None:
    (model,), text = _accept(
        [sources["classifier"]], tmp_path / "report", "--backend", "openvino", "--dtype", "float16"
    )
    assert model["errors"]["compile"].startswith("dtype 'float16' is not known for openvino")
    assert "- **failed**, compile: `dtype 'float16'" in text


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (("--cores", "zero"), {}, "--cores: cores 'zero': must be a number of cores"),
        (("--seconds", "0"), {}, "--seconds 0.0: must be more than 0"),
        (("--seconds", "nan"), {}, "--seconds nan: must be more than 0"),
        (("--price-per-hour", "-1"), {}, "--price-per-hour -1.0: must be 0 or more"),
        (("--bucket", "8"), {}, "--bucket '8': must be BATCHxTOKENS"),
        (
            ("--cores", "2"),
            {"NEURON_RT_VISIBLE_CORES": "0"},
            "cores 2: contradicts NEURON_RT_VISIBLE_CORES=0 in the environment",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], environment: dict[str, str], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    run = _run(
        sources["classifier"], "--backend", "openvino", "--out", tmp_path / "report", *options, environment=environment
    )
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
