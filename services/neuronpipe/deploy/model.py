"""A model from its source to an endpoint, in one call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy import compose, kubernetes, sagemaker
from neuronpipe.deploy.compose import ComposeTarget
from neuronpipe.deploy.endpoint import Endpoint, ServerlessConfig, endpoint_name
from neuronpipe.deploy.kubernetes import KubernetesTarget
from neuronpipe.deploy.predictors import Predictor, SageMakerPredictor
from neuronpipe.deploy.sagemaker import SageMakerPlace, SageMakerTarget
from neuronpipe.deploy.steps import Step, take
from neuronpipe.tasks import TASKS

_TARGETS = {"compose": ComposeTarget, "kubernetes": KubernetesTarget, "sagemaker": SageMakerTarget}


class Target(Protocol):
    """Where an endpoint is deployed."""

    name: str

    def deploying(self) -> Iterator[Step]:
        """The steps that deploy it, and wait until it answers."""

    def call(self) -> str:
        """A command that asks it."""


def make_target(to: str, endpoint: Endpoint, **options: Any) -> Target:
    """The place by its name, with options of its class: ComposeTarget, KubernetesTarget or SageMakerPlace.

    Raises SetupError.
    """
    _check_model(endpoint)
    if to == "compose":
        return ComposeTarget(endpoint, **options)
    if to == "kubernetes":
        return KubernetesTarget(endpoint, **options)
    if to == "sagemaker":
        return SageMakerTarget(endpoint, SageMakerPlace(**{"image": "", "role": "", "bucket": ""} | options))
    raise SetupError(f"to: {to!r}, must be one of {', '.join(_TARGETS)}")


def _check_model(endpoint: Endpoint) -> None:
    """Raises SetupError for what no compile step takes, which a dry run and a cluster would find late."""
    if endpoint.source.startswith(("/", ".", "~")) and not endpoint.folder:
        raise SetupError(f"{endpoint.source}: no such folder")
    if endpoint.task and endpoint.task.replace("-", "_") not in TASKS:
        names = ", ".join(name.replace("_", "-") for name in TASKS)
        raise SetupError(f"task {endpoint.task!r}: is not known; there are: {names}")


def undeploying(to: str, name: str) -> Iterator[Step]:
    """The steps that leave nothing of an endpoint."""
    if to == "compose":
        return compose.undeploying(name)
    return kubernetes.undeploying(name) if to == "kubernetes" else sagemaker.undeploying(name)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A model of the Hub or of a folder; see Endpoint."""

    source: str | Path
    task: str = ""
    name: str = ""
    dtype: str = ""
    backend: str = "openvino"

    def deploy(
        self,
        to: str = "compose",
        *,
        serverless: ServerlessConfig | None = None,
        min_executors: int = 1,
        max_executors: int | None = None,
        report: Callable[[str], Any] = print,
        **options: Any,
    ) -> Predictor | SageMakerPredictor:
        """Deploys it, waits until it answers, and returns what calls it. `options`: see make_target.

        Raises SetupError.
        """
        endpoint = Endpoint(
            name=self.name or endpoint_name(str(self.source)),
            source=str(self.source),
            task=self.task,
            dtype=self.dtype,
            backend=self.backend,
            serverless=serverless,
            min_executors=min_executors,
            max_executors=max(min_executors, 1) if max_executors is None else max_executors,
        )
        target = make_target(to, endpoint, **options)
        take(target.deploying(), report, is_dry=False)
        return predictor_of(target, report)


def predictor_of(target: Target, report: Callable[[str], Any] = print) -> Predictor | SageMakerPredictor:
    """What calls an endpoint that is deployed. Raises SetupError."""

    to = next(to for to, kind in _TARGETS.items() if isinstance(target, kind))

    def undeploy() -> None:
        take(undeploying(to, target.name), report, is_dry=False)

    if isinstance(target, SageMakerTarget):
        return SageMakerPredictor(target.name, undeploy, target.inputs)
    assert isinstance(target, ComposeTarget | KubernetesTarget)  # noqa: S101 (make_target makes no other)
    return Predictor(target.connected(), undeploy, target.api_key)
