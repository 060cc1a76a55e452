"""A model, its bundle, made on this machine, and the endpoint that serves it, deployed step by step.

Each step describes itself, so that a dry run is the list of descriptions.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe import __version__
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.errors import SetupError

# A wheel has these files beside this file, a checkout at its root.
_FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[3])
_INSTALL = {
    "docker": "install Docker Engine, or Podman with its docker command",
    "kubectl": "install kubectl, https://kubernetes.io/docs/tasks/tools/",
}


@dataclass(frozen=True, slots=True)
class DeployStep:
    """A step of a deployment. `text`: its description, for people. `run`: takes the step, and raises SetupError."""

    text: str
    run: Callable[[], object]


def command(*words: str, variables: Mapping[str, str] | None = None) -> DeployStep:
    """Runs a program, whose output is shown if it fails. `variables` are added to its environment."""
    added = variables or {}
    text = shlex.join([*(f"{name}={value}" for name, value in added.items()), *words])
    return DeployStep(text, lambda: run_program(words, added))


def run_program(words: Sequence[str], variables: Mapping[str, str], *, input: str | None = None) -> str:
    """Runs a program, and returns its output. Raises SetupError with its last lines if it is missing or fails."""
    if not shutil.which(words[0]):
        raise SetupError(f"{words[0]} is not on this machine: {_INSTALL.get(words[0], 'install it')}")
    result = subprocess.run(  # noqa: S603 (no shell)
        words, env={**os.environ, **variables}, input=input, capture_output=True, text=True, check=False
    )
    if result.returncode:
        last_lines = (result.stderr or result.stdout).strip().splitlines()[-5:]
        raise SetupError(f"{words[0]} ended with {result.returncode}: {shlex.join(words)}\n" + "\n".join(last_lines))
    return result.stdout


def written(file: Path, content: str) -> DeployStep:
    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    return DeployStep(f"write {file}:\n" + "\n".join(f"    {line}" for line in content.splitlines()), write)


def take(steps: Iterable[DeployStep], report: Callable[[str], Any], *, is_dry: bool) -> None:
    """Takes steps one after the other, and reports each before; a dry run only reports. Raises SetupError."""
    for step in steps:
        report(step.text if is_dry else step.text.partition("\n")[0].rstrip(":"))
        if not is_dry:
            step.run()


def shipped(name: str) -> Path:
    """Returns the path of a file or folder that deployments use. Raises SetupError if it is not installed."""
    for folder in _FOLDERS:
        if (folder / name).exists():
            return folder / name
    raise SetupError(f"{name} is not part of this installation; install neuronpipe from a wheel or a checkout")


# https://docs.aws.amazon.com/sagemaker/latest/dg/serverless-endpoints.html: 1 to 6 GB in steps of 1 GB, and at most 200
# requests at once.
_MEMORY_STEP_MB, _MAX_MEMORY_MB, _MAX_CONCURRENCY = 1024, 6144, 200
_MAX_EXECUTORS = 1000
# Names that Kubernetes, Compose and SageMaker all accept.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ServerlessConfig:
    """The limits of serverless endpoints: 1024 to 6144 MB, and 1 to 200 requests at once. Raises SetupError."""

    memory_mb: int = 2048
    max_concurrency: int = 5

    def __post_init__(self) -> None:
        if self.memory_mb not in range(_MEMORY_STEP_MB, _MAX_MEMORY_MB + 1, _MEMORY_STEP_MB):
            raise SetupError(
                f"memory_mb: {self.memory_mb}, must be {_MEMORY_STEP_MB} to {_MAX_MEMORY_MB} in steps of "
                f"{_MEMORY_STEP_MB}, as of serverless endpoints"
            )
        if self.max_concurrency not in range(1, _MAX_CONCURRENCY + 1):
            raise SetupError(f"max_concurrency: {self.max_concurrency}, must be 1 to {_MAX_CONCURRENCY}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an endpoint, on any target. Raises SetupError.

    - `source`: an id on the Hub, a folder as transformers writes it, or a bundle.
    - `dtype`, `task`: empty: by the model's own files.
    - `min_executors`, `max_executors`: the number of processes that run the model.
    - `image_prefix`, `version`: the parts of images' names, as PREFIX/gateway:VERSION.
    """

    name: str
    source: str
    task: str = ""
    dtype: str = ""
    backend: str = "openvino"
    serverless: ServerlessConfig | None = None
    min_executors: int = 1
    max_executors: int = 1
    image_prefix: str = "neuronpipe"
    version: str = __version__

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            problem = "must be of a to z, 0 to 9 and -, at most 42 characters, and neither begin nor end with -"
            raise SetupError(f"name {self.name!r}: {problem}; choose one with --name")
        if not 0 <= self.min_executors <= self.max_executors or not 1 <= self.max_executors <= _MAX_EXECUTORS:
            advice = f"must be 0 to {_MAX_EXECUTORS}, the smaller one first, and max at least 1"
            raise SetupError(f"min and max: {self.min_executors} and {self.max_executors}; {advice}")

    @property
    def folder(self) -> Path | None:
        path = Path(self.source)
        return path if path.is_dir() else None

    @property
    def compile_options(self) -> list[str]:
        """The options of `neuronpipe compile`, in addition to SOURCE, name and repository."""
        backend = "" if self.backend == "openvino" else self.backend
        values = {"--task": self.task.replace("_", "-"), "--dtype": self.dtype, "--backend": backend}
        return [word for option, value in values.items() if value for word in (option, value)]


def endpoint_name(source: str) -> str:
    """Returns the default name of an endpoint: the last part of its source, in lower case, other characters as -."""
    return re.sub(r"[^a-z0-9]+", "-", Path(source).resolve().name.lower()).strip("-")[:42].strip("-")


def given_bundle(endpoint: Endpoint) -> Bundle | None:
    """Returns the bundle that the source is; None for a source that must be compiled. Raises SetupError."""
    if endpoint.folder is None or not (endpoint.folder / MANIFEST_FILE).is_file():
        return None
    [bundle] = read_repository(endpoint.folder)
    return bundle


def model_name(endpoint: Endpoint) -> str:
    bundle = given_bundle(endpoint)
    return bundle.spec.name if bundle else endpoint.name


def make_bundle(endpoint: Endpoint, repository: Path, report: Callable[[str], None]) -> Bundle:
    """Returns the bundle that the source is, or compiles the source into a repository. Raises SetupError."""
    if bundle := given_bundle(endpoint):
        return bundle
    try:
        from neuronpipe.compiler import CompileRequest, compile_bundle
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{endpoint.source}: to compile it here, {error.name} is needed: pip install 'neuronpipe[compile]'"
        ) from error
    request = CompileRequest(
        source=endpoint.source,
        task=endpoint.task.replace("-", "_"),
        repository=repository,
        name=endpoint.name,
        backend=endpoint.backend,
        dtype=endpoint.dtype,
    )
    return compile_bundle(request, report)
