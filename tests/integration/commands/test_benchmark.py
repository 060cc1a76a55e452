"""neuronpipe benchmark: from the command to the report, with a small model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neuronpipe.measure.benchmark.results import read_results
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.suite.commands import run
from tests.suite.waiting import until

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_LIMIT_S = 250


def _command(bundle: Path, out: Path, *options: str) -> list[str]:
    quick = ("--cell-seconds", "0.3", "--calls", "20", "--cores", "1", "--base-length", "16")
    return [
        *("benchmark", "--repository", str(bundle), "--out", str(out)),
        *(*quick, "--batches", "1,2", "--throughput-batches", "1", *options),
    ]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of up to 64 tokens."""
    folder = tmp_path_factory.mktemp("model")
    source = make_source(folder / "source", "BERT", "text_classification")
    return compile_model(source, folder / "repository", "text_classification", name="classifier").folder


@pytest.fixture(scope="module")
def finished(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a length that the model does not take."""
    out = tmp_path_factory.mktemp("benchmark")
    found = run(*_command(bundle, out, "--lengths", "8,16,9000"))
    assert found.returncode == 0, found.stderr
    return out


def test_a_run_measures_its_cells_and_says_why_one_has_no_figures(finished: Path) -> None:
    results = read_results(finished)
    assert [(timed.cell.batch, timed.cell.length) for timed in results.measured] == [(1, 8), (1, 16), (2, 16)]
    for timed in results.measured:
        assert timed.tokens == timed.cell.length
        assert timed.preprocess_ms + timed.predict_ms + timed.postprocess_ms == pytest.approx(timed.mean_ms, rel=1e-3)
        assert min(timed.preprocess_ms, timed.predict_ms, timed.postprocess_ms) > 0
        assert len(timed.latency_ms) >= 3
    (refused,) = (cell for cell in results.cells if cell.reason)
    assert refused.cell.length == 9000
    assert "9000" in refused.reason
    assert "9000 tokens, the model takes 64" in (finished / "README.md").read_text()
    assert (finished / "latency-by-length.svg").stat().st_size > 1_000


def test_a_run_that_is_complete_measures_nothing_again(bundle: Path, finished: Path) -> None:
    before = (finished / "results.json").read_text()
    found = run(*_command(bundle, finished, "--lengths", "8,16,9000", "--p95-ms", "500", "--rate", "10"))
    assert found.returncode == 0, found.stderr
    assert json.loads((finished / "results.json").read_text())["cells"] == json.loads(before)["cells"]
    assert "REPLICAS" in found.stdout.upper()


def test_a_run_that_is_interrupted_goes_on(bundle: Path, tmp_path: Path) -> None:
    command = _command(bundle, tmp_path, "--lengths", "8,12,16,20,24", "--cell-seconds", "1.5", "--calls", "1000000")
    words = [sys.executable, "-m", "neuronpipe", *command]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        until(lambda: (tmp_path / "results.json").exists() or process.poll() is not None, "the first results")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        assert process.wait(_LIMIT_S) == 130
    first = read_results(tmp_path)
    assert 0 < len(first.cells) < 6
    assert "not complete" in (tmp_path / "README.md").read_text()
    found = run(*command)
    assert found.returncode == 0, found.stderr
    whole = read_results(tmp_path)
    assert whole.is_complete
    assert whole.cells[: len(first.cells)] == first.cells
    refused = run(*command, "--precision", "0.2")
    assert refused.returncode == 2
    assert "another time or precision; give --fresh" in refused.stderr


def test_what_takes_too_long_is_refused_with_an_estimate_before_it_starts(bundle: Path, tmp_path: Path) -> None:
    found = run(*_command(bundle, tmp_path, "--cell-seconds", "600", "--minutes", "5"))
    assert found.returncode == 2
    assert "which is more than --minutes 5" in found.stderr
    assert not (tmp_path / "results.json").exists()


def test_two_runs_are_compared_and_what_is_worse_ends_with_1(finished: Path, tmp_path: Path) -> None:
    compare = ("benchmark", "compare")
    same = run(*compare, str(finished), str(finished))
    assert same.returncode == 0, same.stderr
    assert "3 cells compared, B to A: 0 worse" in same.stdout
    slower = json.loads((finished / "results.json").read_text())
    for cell in slower["cells"]:
        cell["latency_ms"] = [value * 10 for value in cell["latency_ms"]]
    (tmp_path / "results.json").write_text(json.dumps(slower))
    worse = run(*compare, str(finished), str(tmp_path))
    assert worse.returncode == 1
    assert worse.stdout.count("REGRESSION") == 3
    (tmp_path / "results.json").write_text(json.dumps(slower | {"schema_version": 9}))
    refused = run(*compare, str(finished), str(tmp_path))
    assert refused.returncode == 2
    assert "schema version 9, this neuronpipe reads 1" in refused.stderr


def test_a_variant_that_cannot_be_loaded_says_why_in_each_cell(bundle: Path, tmp_path: Path) -> None:
    found = run(*_command(bundle, tmp_path, "--lengths", "8", "--cores", "200"))
    assert found.returncode == 1
    assert all("cores: 200" in cell.reason for cell in read_results(tmp_path).cells)
