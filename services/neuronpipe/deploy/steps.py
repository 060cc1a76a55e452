"""The steps of a deployment: each says what it does, so that a dry run is their list."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError

# In a wheel they are beside this file, in a checkout at its root.
_FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[3])
_INSTALL = {
    "docker": "install Docker Engine, or Podman with its docker command",
    "kubectl": "install kubectl, https://kubernetes.io/docs/tasks/tools/",
}


@dataclass(frozen=True, slots=True)
class Step:
    """`text`: what it does, for people; `run` does it, and raises SetupError."""

    text: str
    run: Callable[[], object]


def command(*words: str, variables: Mapping[str, str] | None = None) -> Step:
    """Runs a program, whose output is shown where it fails. `variables` are added to its environment."""
    added = variables or {}
    text = shlex.join([*(f"{name}={value}" for name, value in added.items()), *words])
    return Step(text, lambda: run_program(words, added))


def run_program(words: Sequence[str], variables: Mapping[str, str], *, input: str | None = None) -> str:
    """What a program prints. Raises SetupError where it is missing, or fails, with its last words."""
    if not shutil.which(words[0]):
        raise SetupError(f"{words[0]} is not on this machine: {_INSTALL.get(words[0], 'install it')}")
    result = subprocess.run(  # noqa: S603 (no shell)
        words, env={**os.environ, **variables}, input=input, capture_output=True, text=True, check=False
    )
    if result.returncode:
        said = (result.stderr or result.stdout).strip().splitlines()[-5:]
        raise SetupError(f"{words[0]} ended with {result.returncode}: {shlex.join(words)}\n" + "\n".join(said))
    return result.stdout


def written(file: Path, content: str) -> Step:
    """Writes a file."""

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    return Step(f"write {file}:\n" + "\n".join(f"    {line}" for line in content.splitlines()), write)


def take(steps: Iterable[Step], report: Callable[[str], Any], *, is_dry: bool) -> None:
    """Takes steps one after the other, each reported before it; a dry run only reports. Raises SetupError."""
    for step in steps:
        report(step.text if is_dry else step.text.partition("\n")[0].rstrip(":"))
        if not is_dry:
            step.run()


def shipped(name: str) -> Path:
    """The path of a file or folder of this project that deployments are made of: deploy, docker/compose.yaml.

    Raises SetupError where this installation does not have it.
    """
    for folder in _FOLDERS:
        if (folder / name).exists():
            return folder / name
    raise SetupError(f"{name} is not part of this installation; install neuronpipe from a wheel or a checkout")
