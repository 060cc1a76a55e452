"""An endpoint in containers: what Compose makes of it, and the commands, with an engine that is a script."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy.compose import ComposeTarget, undeploying
from neuronpipe.deploy.endpoint import Endpoint, ServerlessConfig, shipped, take
from tests.unit.bundles.written import write_bundle
from tests.unit.deploy.programs import Programs

_SERVERLESS = ServerlessConfig(memory_mb=4096, max_concurrency=10)


def _endpoint(**changes: Any) -> Endpoint:
    return Endpoint(**{"name": "m", "source": "hub/m", "task": "text-classification"} | changes)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setattr("neuronpipe.deploy.compose.ComposeTarget._wait", lambda self: None)
    (tmp_path / "bin").mkdir()
    found = Programs(tmp_path / "bin", monkeypatch)
    found.add("docker", **{"compose version": "v2", "ps -aq compile": "container"})
    return found


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="reads the file with docker-compose: make setup")
def test_compose_makes_of_it_what_was_asked_for() -> None:
    target = ComposeTarget(
        _endpoint(serverless=_SERVERLESS, source="hub/model", dtype="int8"), port=50060, http_port=8090
    )
    words = ["docker-compose", "-f", str(shipped("docker/compose.yaml")), "config"]
    environment = {**os.environ, **target.variables}
    made = yaml.safe_load(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)["services"]
    assert str(made["neuron-executor"]["mem_limit"]) in ("4096m", str(4096 << 20))
    assert made["gateway"]["environment"]["NEURONPIPE_GATEWAY_MAX_REQUESTS_IN_FLIGHT"] == "10"
    assert "127.0.0.1:50060:50050" in str(made["gateway"]["ports"])
    assert "127.0.0.1:8090:8080" in str(made["gateway"]["ports"])
    assert made["compile"]["command"].split() == [
        *("compile", "hub/model", "--task", "text-classification", "--name", "m", "--repository", "/repository"),
        *("--if-missing", "--dtype=int8"),
    ]


def test_a_model_of_the_hub_is_compiled_by_the_stack_itself(programs: Programs) -> None:
    said: list[str] = []
    take(ComposeTarget(_endpoint(min_executors=3, max_executors=3)).deploying(), said.append, is_dry=False)
    starting = [call for call in programs.calls if " up " in call]
    assert len(starting) == 1
    assert starting[0].endswith("up -d --scale neuron-executor=3 gateway tokenizer neuron-executor postprocessor redis")
    assert said[-1] == "wait until 127.0.0.1:50050 answers"


@pytest.mark.parametrize("is_bundle", [True, False])
def test_a_folder_is_copied_where_the_compile_step_looks(programs: Programs, tmp_path: Path, is_bundle: bool) -> None:
    source = write_bundle(tmp_path / "models", "classifier") if is_bundle else tmp_path
    target = ComposeTarget(_endpoint(source=str(source)))
    assert target.variables["MODEL_NAME"] == ("classifier" if is_bundle else "m")
    take(target.deploying(), lambda line: None, is_dry=False)
    [copied] = [call for call in programs.calls if call.startswith("docker cp")]
    assert copied.endswith("container:/repository" if is_bundle else "container:/sources")


def test_a_dry_run_does_nothing_and_says_all(programs: Programs) -> None:
    said: list[str] = []
    take(ComposeTarget(_endpoint(serverless=_SERVERLESS)).deploying(), said.append, is_dry=True)
    assert [call for call in programs.calls if "version" not in call] == []
    assert "EXECUTOR_MEMORY=4096m GATEWAY_MAX_REQUESTS=10" in said[0]


def test_nothing_is_left(programs: Programs) -> None:
    take(undeploying("m"), lambda line: None, is_dry=False)
    assert programs.calls[-1].endswith("down --volumes --remove-orphans")


def test_an_engine_that_is_missing_is_said_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="docker is not on this machine: install Docker Engine"):
        take(ComposeTarget(_endpoint()).deploying(), lambda line: None, is_dry=False)


def test_a_program_that_fails_is_said_with_its_last_words(programs: Programs) -> None:
    from neuronpipe.deploy.endpoint import run_program

    with pytest.raises(SetupError, match=r"docker ended with 3: docker fail\nbroken"):
        run_program(["docker", "fail"], {})
