"""The commands around containers, with an engine that is a script: what they say and what they write."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DOCKER = _ROOT / "docker"

# An engine whose gateway is healthy, and whose compile step has ended with the code in COMPILE_CODE.
_ENGINE = """#!/bin/bash
case "$*" in
  *State.ExitCode*) echo "$COMPILE_CODE" ;;
  *State.Health*) echo healthy ;;
  "logs "*compile-container) echo 'neuronpipe: /sources/m/model.safetensors: not readable for user 65532' >&2 ;;
  "image inspect --format {{.Size}} "*) grep -F "${!#} " "$SIZES" | { read -r name size && echo "$size"; } ;;
esac
"""
_COMPOSE = """#!/bin/bash
case "$*" in
  *"up -d") exit "$COMPILE_CODE" ;;
  *"ps -aq compile") echo compile-container ;;
  *"ps -q gateway") echo gateway-container ;;
esac
"""


@pytest.fixture
def commands(tmp_path: Path) -> Mapping[str, str]:
    """The environment with a fake `docker` and `compose` in front of the path."""
    for name, script in (("docker", _ENGINE), ("compose", _COMPOSE)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER": "docker", "COMPOSE": "compose"}


def _run(environment: Mapping[str, str], *command: str, input: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=_ROOT, env=environment, input=input, capture_output=True, text=True, check=False, timeout=60
    )


def _up(commands: Mapping[str, str], compile_code: int) -> "subprocess.CompletedProcess[str]":
    # Without building images.
    return _run({**commands, "COMPILE_CODE": str(compile_code)}, "make", "--silent", "--old-file=images", "up")


def test_make_up_ends_with_the_reason_of_the_compile_step_that_failed(commands: Mapping[str, str]) -> None:
    result = _up(commands, 2)
    assert result.returncode != 0
    assert result.stdout.splitlines()[-2:] == [
        "the compile step failed:",
        "neuronpipe: /sources/m/model.safetensors: not readable for user 65532",
    ]


def test_make_up_tells_how_long_the_start_took(commands: Mapping[str, str]) -> None:
    result = _up(commands, 0)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("all healthy after ")


def test_with_engine_runs_several_commands_with_one_engine(commands: Mapping[str, str]) -> None:
    result = _run(commands, str(_DOCKER / "with-engine"), input="echo one\necho two\n")
    assert (result.returncode, result.stdout) == (0, "one\ntwo\n")


def test_with_engine_runs_a_command_as_it_is_given(commands: Mapping[str, str]) -> None:
    result = _run(commands, str(_DOCKER / "with-engine"), "echo", "one  two")
    assert (result.returncode, result.stdout) == (0, "one  two\n")


def test_the_table_of_image_sizes_is_written_by_its_command(commands: Mapping[str, str], tmp_path: Path) -> None:
    sizes, page = tmp_path / "sizes", tmp_path / "page.md"
    sizes.write_text("base:1 100000000\np/gateway:2 250600000\np/compile:2 1700000000\n")
    page.write_text((_ROOT / "docs" / "containers.md").read_text())
    environment = {**commands, "SIZES": str(sizes), "PYTHON_IMAGE": "base:1", "IMAGE_PREFIX": "p", "VERSION": "2"}
    result = _run(environment, "python3", str(_DOCKER / "sizes.py"), str(page))
    assert result.returncode == 0, result.stderr
    # What is not built is left out.
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `") and line.endswith(" MB |")]
    assert rows == ["| `gateway` | 251 MB | 151 MB |", "| `compile` | 1,700 MB | 1,600 MB |"]
    assert "on a base of 100 MB.\n<!-- /sizes -->" in page.read_text()
    # Outside of the marks the page is as it was.
    assert (
        page.read_text().partition("<!-- sizes")[0]
        == (_ROOT / "docs" / "containers.md").read_text().partition("<!-- sizes")[0]
    )


def test_a_page_without_a_place_for_the_table_is_left_alone(commands: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "sizes").write_text("base:1 100000000\n")
    (tmp_path / "page.md").write_text("no marks")
    environment = {**commands, "SIZES": str(tmp_path / "sizes"), "PYTHON_IMAGE": "base:1"}
    result = _run(environment, "python3", str(_DOCKER / "sizes.py"), str(tmp_path / "page.md"))
    assert result.returncode == 1
    assert "has no place for the table" in result.stderr


@pytest.mark.parametrize(
    ("given", "address"), [({}, "0.0.0.0:8080"), ({"SAGEMAKER_BIND_TO_PORT": "8123"}, "0.0.0.0:8123")]
)
def test_serve_is_all_on_the_port_that_sagemaker_calls(tmp_path: Path, given: Mapping[str, str], address: str) -> None:
    program = tmp_path / "neuronpipe"
    program.write_text('#!/bin/sh\necho "$NEURONPIPE_ALL_HTTP_LISTEN $*"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    assert _run(environment, "docker/serve", "--cores", "2").stdout == f"{address} serve all --cores 2\n"
