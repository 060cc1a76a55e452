"""`neuronpipe health` against each service, as a container's health check runs it."""

import subprocess
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from tests.suite.commands import run

pytestmark = pytest.mark.local_only

_NOWHERE = "127.0.0.1:9"


def _health(target: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return run("health", "--target", target, *options)


def test_each_of_the_four_services_is_healthy_once_it_serves(fake_repository: Path) -> None:
    with four_processes(fake_repository) as processes:
        found = {name: _health(process.target) for name, process in processes.items()}
    assert {name: done.returncode for name, done in found.items()} == dict.fromkeys(processes, 0)
    assert "neuronpipe.api.v1.InferenceService is serving" in found["gateway"].stdout
    assert "the process is serving" in found["tokenizer"].stdout


def test_all_services_in_one_process_are_healthy_once_they_serve(fake_repository: Path) -> None:
    with ServiceProcess("all", "--repository", str(fake_repository)) as process:
        assert _health(process.wait_until_ready().target).returncode == 0


def test_a_gateway_without_stages_is_not_healthy_but_its_process_is(fake_repository: Path) -> None:
    stages = [word for stage in ("tokenizer", "executor", "postprocessor") for word in (f"--{stage}-target", _NOWHERE)]
    with ServiceProcess("gateway", "--repository", str(fake_repository), *stages) as process:
        target = process.wait_until_ready().target
        needed, alone = _health(target), _health(target, "--service", "")
        (warned,) = (event for event in process.events() if event["event"] == "stages not reached yet")
    assert warned["stages"] == ["neuron-executor", "postprocessor", "tokenizer"]
    assert needed.returncode == 1
    assert (
        "neuronpipe.api.v1.InferenceService: NOT_SERVING; it does not reach: tokenizer, neuron-executor, postprocessor"
        in needed.stderr
    )
    assert alone.returncode == 0
