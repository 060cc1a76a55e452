"""cli/completion.py: what shells complete. bash runs the script itself; for the others, what argcomplete gives them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from neuronpipe.api.v1.models_pb2 import Model
from tests.unit.client.fake_gateway import fake_gateway

_SERVICES = Path(__file__).parents[3] / "services"
_LIMIT_S = 60
_VERSIONS = (("sentiment", "1"), ("squad", "1"), ("sentiment", "2"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a command `neuronpipe` to run, and a file."""
    command = f'#!/bin/sh\nPYTHONPATH={_SERVICES} exec {sys.executable} -m neuronpipe "$@"\n'
    (tmp_path / "neuronpipe").write_text(command)
    (tmp_path / "neuronpipe").chmod(0o755)
    (tmp_path / "texts.txt").touch()
    return tmp_path


@pytest.fixture(scope="module")
def script() -> str:
    """The script for bash; a shell evaluates what the command prints."""
    words, environment = [sys.executable, "-m", "neuronpipe", "completion", "bash"], {"PYTHONPATH": str(_SERVICES)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout


def _bash(folder: Path, script: str, line: str) -> list[str]:
    """What bash offers at the end of a line: it has run the script, and calls its function as for the key TAB."""
    words = [*shlex.split(line), ""] if line.endswith(" ") else shlex.split(line)
    program = f"""
        eval {shlex.quote(script)}
        COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=9
        _python_argcomplete neuronpipe {shlex.quote(words[-1])} {words[-2]} && printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    command, limit_s = ["bash", "-c", program], _LIMIT_S
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=True
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("neuronpipe inf", ["infer"]),
        ("neuronpipe infer --mo", ["--model"]),
        ("neuronpipe infer --task sent", ["sentence-embedding", "sentence-similarity"]),
        ("neuronpipe infer --truncation ", ["error", "right", "left"]),
        ("neuronpipe infer --texts @te", ["texts.txt"]),  # to bash, @ ends a word
        ("neuronpipe infer --image te", ["texts.txt"]),
        ("neuronpipe serve g", ["gateway"]),
        ("neuronpipe serve gateway --tokeni", ["--tokenizer-target"]),
        ("neuronpipe serve all --repository te", ["texts.txt"]),
        ("neuronpipe infer --target 127.0.0.1:9 --model ", []),  # nothing listens on the discard port
        ("neuronpipe infer --model ", []),
    ],
)
def test_bash_completes(folder: Path, script: str, line: str, offered: list[str]) -> None:
    assert _bash(folder, script, line) == offered


@pytest.mark.parametrize("command", ["infer", "trace", "load"])
def test_bash_completes_the_names_of_a_gateways_models(folder: Path, script: str, command: str) -> None:
    with fake_gateway() as gateway:
        gateway.models = [Model(name=name, version=version) for name, version in _VERSIONS]
        expected = ["sentiment", "squad"]
        assert _bash(folder, script, f"neuronpipe {command} --target {gateway.target} --model s") == expected


@pytest.mark.parametrize(("shell", "separator"), [("zsh", ":"), ("fish", "\t")])
def test_zsh_and_fish_get_descriptions_too(folder: Path, shell: str, separator: str) -> None:
    script = subprocess.run(
        [folder / "neuronpipe", "completion", shell], capture_output=True, text=True, timeout=_LIMIT_S, check=True
    ).stdout
    assert "neuronpipe" in script
    line = "neuronpipe infer --top"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": shell,
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "offered"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    if shell == "fish":
        asked["_ARGCOMPLETE_DFS"] = separator
    subprocess.run([folder / "neuronpipe"], env=asked, timeout=_LIMIT_S, check=True)
    assert f"--top-n{separator}rerank: how many texts to return" in (folder / "offered").read_text()


def test_commands_start_without_argcomplete(folder: Path) -> None:
    program = "import sys; from neuronpipe.cli import make_parser; make_parser(); print('argcomplete' in sys.modules)"
    environment = {"PYTHONPATH": str(_SERVICES)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
