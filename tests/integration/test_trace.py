"""`neuronpipe trace` against four processes, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.core.names import Spans

pytestmark = pytest.mark.local_only

_INPUT = '{"sentence_embedding": {"text": "A fine day."}}'


def _trace(target: str, *options: str, model: str = "minilm") -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "neuronpipe",
        "trace",
        "--target",
        target,
        "--model",
        model,
        "--json",
        _INPUT,
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_waterfall_shows_all_services_and_the_batch(fake_repository: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "trace.html", tmp_path / "trace.json"
    with four_processes(fake_repository, "--kept-traces", "50") as processes:
        target = processes["gateway"].target
        done = _trace(target, "--html", str(page), "--otlp", str(file))
        failed = _trace(target, model="none")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    for word in (
        "Infer",
        Spans.PREPROCESS,
        "Tokenize",
        Spans.PREDICT,
        "Execute",
        Spans.QUEUE,
        Spans.COMPUTE,
        "Postprocess",
        *processes,
    ):
        assert word in words, word
    assert "batch of 1 on fake" in done.stdout
    assert "this request" in done.stdout
    assert "<svg" in page.read_text()
    services = {
        resource["resource"]["attributes"][0]["value"]["stringValue"]
        for resource in json.loads(file.read_text())["resourceSpans"]
    }
    assert services == set(processes)
    # A request that fails is shown, too, and fails the command.
    assert failed.returncode == 1
    assert "NOT_FOUND" in failed.stdout
    assert failed.stderr.startswith("neuronpipe: MODEL_NOT_FOUND")


def test_servers_keep_no_traces_unless_told_to(fake_repository: Path) -> None:
    with ServiceProcess("all", "--repository", str(fake_repository)) as process:
        done = _trace(process.wait_until_ready().target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kept-traces" in done.stderr
