"""`neuronpipe trace` against four processes, as a user runs it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.core.names import Events, Spans
from tests.suite.commands import run

pytestmark = pytest.mark.local_only

_INPUT = '{"sentence_embedding": {"text": "A fine day."}}'


_PROMPT = '{"text_generation": {"prompt": "A module", "options": {"max_new_tokens": 20}}}'


def _trace(
    target: str, *options: str, model: str = "minilm", input: str = _INPUT
) -> "subprocess.CompletedProcess[str]":
    return run("trace", "--target", target, "--model", model, "--json", input, *options)


def test_the_waterfall_shows_all_services_and_the_batch(fake_repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with four_processes(fake_repository, "--kept-traces", "50") as processes:
        target = processes["gateway"].target
        done = _trace(target, "--otlp", str(file))
        failed = _trace(target, model="none")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    calls, parts = ("Infer", "Tokenize", "Execute", "Postprocess"), (Spans.PREPROCESS, Spans.PREDICT)
    assert {*calls, *parts, Spans.QUEUE, Spans.COMPUTE, *processes} - {*words} == set()
    assert "batch of 1 on fake" in done.stdout
    assert "this request" in done.stdout
    services = {
        resource["resource"]["attributes"][0]["value"]["stringValue"]
        for resource in json.loads(file.read_text())["resourceSpans"]
    }
    assert services == set(processes)
    # A request that fails is shown, too, and fails the command.
    assert failed.returncode == 1
    assert "NOT_FOUND" in failed.stdout
    assert failed.stderr.startswith("neuronpipe: MODEL_NOT_FOUND")


def test_the_waterfall_of_a_text_has_its_first_token_and_some_of_its_steps(writer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with four_processes(writer_folder / "repository", "--kept-traces", "50") as processes:
        done = _trace(processes["gateway"].target, "--otlp", str(file), model="writer", input=_PROMPT)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"^first token after ([\d.]+) ms = pre-process ([\d.]+) \+ queue ([\d.]+) \+ prefill ([\d.]+) \+ "
        r"hops ([\d.]+); then 19 tokens, ([\d.]+) ms each, the longest gap ([\d.]+) ms$",
        done.stdout,
        re.MULTILINE,
    )
    assert found, done.stdout
    total, *parts, token, gap = map(float, found.groups())
    # Five figures, each rounded to a thousandth.
    assert total == pytest.approx(sum(parts), abs=0.004)
    assert 0 < token <= gap
    # The steps 1 and 17 of 20.
    assert done.stdout.count("step of 1 on openvino: ") == 2
    assert Events.FIRST_TOKEN in file.read_text()


def test_servers_keep_no_traces_unless_told_to(fake_repository: Path) -> None:
    with ServiceProcess("all", "--repository", str(fake_repository)) as process:
        done = _trace(process.wait_until_ready().target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kept-traces" in done.stderr
