"""What is deployed: a model, and the endpoint that serves it."""

import re
from dataclasses import dataclass
from pathlib import Path

from neuronpipe import __version__
from neuronpipe.core.errors import SetupError

# https://docs.aws.amazon.com/sagemaker/latest/dg/serverless-endpoints.html: 1 to 6 GB in steps of 1 GB, and at most 200
# requests at once.
_MEMORY_STEP_MB, _MAX_MEMORY_MB, _MAX_CONCURRENCY = 1024, 6144, 200
_MAX_EXECUTORS = 1000
# What Kubernetes, Compose and SageMaker all take as a name.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ServerlessConfig:
    """As serverless endpoints have them: memory in MB, 1024 to 6144 in steps of 1024; requests at once, 1 to 200.

    Raises SetupError.
    """

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
    """A model behind an endpoint, wherever it is deployed. Raises SetupError.

    `source`: an id on the Hub, a folder as transformers writes it, or a bundle. `dtype`, `task`: empty: as the model's
    own files say. `min_executors`, `max_executors`: of those that run the model. `image_prefix`, `version`: of the
    images PREFIX/gateway:VERSION and so on.
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
            raise SetupError(
                f"name {self.name!r}: must be of a to z, 0 to 9 and -, at most 42 characters, and neither begin nor "
                "end with -; choose one with --name"
            )
        if not 0 <= self.min_executors <= self.max_executors or not 1 <= self.max_executors <= _MAX_EXECUTORS:
            raise SetupError(
                f"min and max: {self.min_executors} and {self.max_executors}; must be 0 to {_MAX_EXECUTORS}, the "
                "smaller one first, and max at least 1"
            )

    @property
    def folder(self) -> Path | None:
        """The source, where it is a folder."""
        path = Path(self.source)
        return path if path.is_dir() else None

    @property
    def compile_options(self) -> list[str]:
        """What `neuronpipe compile` is given besides SOURCE, name and repository."""
        backend = [] if self.backend == "openvino" else ["--backend", self.backend]
        return [
            *(["--task", self.task.replace("_", "-")] if self.task else []),
            *(["--dtype", self.dtype] if self.dtype else []),
            *backend,
        ]


def endpoint_name(source: str) -> str:
    """The default name of an endpoint: the last part of its source, in lower case, other characters as -."""
    return re.sub(r"[^a-z0-9]+", "-", Path(source).resolve().name.lower()).strip("-")[:42].strip("-")
