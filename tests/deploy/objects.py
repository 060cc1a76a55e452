"""What rules ask of a set of objects."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from neuronpipe.api.v1 import inference_pb2
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.settings import Settings, fields_of, variable_name
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages.settings import NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings
from tests.deploy.combinations import ROOT, Manifest

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
BUILT = dict(
    line.split("=", 1) for line in (ROOT / "docker" / ".env").read_text().splitlines() if re.match(r"\w+=", line)
)
# image → the settings of what it runs
SETTINGS: Mapping[str, type[Settings]] = {
    "gateway": PipelineProcessSettings,
    "tokenizer": TokenizerSettings,
    "neuron-executor": NeuronExecutorSettings,
    "gpu": NeuronExecutorSettings,
    "neuron": NeuronExecutorSettings,
    "postprocessor": PostprocessorSettings,
    "worker": WorkerSettings,
    "sagemaker": AllSettings,
}
# image of an executor → (back end, resource of the device)
BACKENDS = {
    "neuron-executor": ("openvino", ""),
    "gpu": ("torch", "nvidia.com/gpu"),
    "neuron": ("neuronx", "aws.amazon.com/neuroncore"),
}
# The images of what a request passes.
CALLED = {"gateway", "tokenizer", "postprocessor", *BACKENDS}
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_WORKLOADS = ("Deployment", "StatefulSet", "Job")


@dataclass(frozen=True)
class Container:
    """A container of a workload."""

    workload: "Workload"
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.workload}, container {self.content['name']}"

    @property
    def target(self) -> str:
        """The target of the Dockerfile that makes its image; empty for another's image."""
        prefix, _, name = self.content["image"].partition(":")[0].rpartition("/")
        return name if prefix == BUILT["IMAGE_PREFIX"] else ""

    @property
    def target_service(self) -> str:
        """What `neuronpipe serve` calls it."""
        return "neuron-executor" if self.target in BACKENDS else self.target

    @property
    def environment(self) -> dict[str, Any]:
        """The variables, with the value that they have here or in a ConfigMap; None for that of a secret."""
        return {env["name"]: env.get("value", self._configured(env)) for env in self.content.get("env", [])}

    def _configured(self, variable: Mapping[str, Any]) -> str | None:
        asked = variable.get("valueFrom", {}).get("configMapKeyRef", {"name": "", "key": ""})
        return self.workload.configuration.get(asked["name"], {}).get(asked["key"])

    @property
    def ports(self) -> dict[str, int]:
        """The ports, by name."""
        return {port["name"]: port["containerPort"] for port in self.content.get("ports", [])}

    @property
    def mounts(self) -> dict[str, Mapping[str, Any]]:
        """What is mounted, by path."""
        return {mount["mountPath"]: mount for mount in self.content.get("volumeMounts", [])}

    def setting(self, name: str) -> Any:
        """A setting of its service: what is set, or else the default."""
        kind = SETTINGS[self.target]
        return self.environment.get(variable_name(kind, name), fields_of(kind)[name].default)


@dataclass(frozen=True)
class Workload:
    """A Deployment, StatefulSet or Job. `configuration`: the content of each ConfigMap."""

    manifest: Manifest
    configuration: Mapping[str, Mapping[str, str]]

    def __str__(self) -> str:
        return f"{self.manifest['kind']} {self.name}"

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def is_job(self) -> bool:
        """Whether its pods end by themselves."""
        return bool(self.manifest["kind"] == "Job")

    @property
    def labels(self) -> Mapping[str, str]:
        """Those of its pods."""
        return self.manifest["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]

    @property
    def pod(self) -> Mapping[str, Any]:
        """The specification of its pods."""
        return self.manifest["spec"]["template"]["spec"]  # type: ignore[no-any-return]

    @property
    def containers(self) -> list[Container]:
        """Its containers."""
        return [Container(self, content) for content in self.pod["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """The ports of its containers, by name."""
        return {name: port for container in self.containers for name, port in container.ports.items()}

    @property
    def checks(self) -> list[Container]:
        """The containers that run before the others."""
        return [Container(self, content) for content in self.pod.get("initContainers", [])]

    @property
    def volumes(self) -> dict[str, Mapping[str, Any]]:
        """Its volumes, and claims of its own, by name."""
        claimed = {
            template["metadata"]["name"]: template for template in self.manifest["spec"].get("volumeClaimTemplates", [])
        }
        return {volume["name"]: volume for volume in self.pod.get("volumes", [])} | claimed


class Objects:
    """A rendered set."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests

    def of_kind(self, kind: str) -> dict[str, Manifest]:
        """The objects of a kind, by name."""
        return {manifest["metadata"]["name"]: manifest for manifest in self.manifests if manifest["kind"] == kind}

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """All that makes pods, by name."""
        configuration = {name: manifest["data"] for name, manifest in self.of_kind("ConfigMap").items()}
        found = (Workload(manifest, configuration) for manifest in self.manifests if manifest["kind"] in _WORKLOADS)
        return {workload.name: workload for workload in found}

    @property
    def containers(self) -> Iterator[Container]:
        """The containers of all workloads."""
        for workload in self.workloads.values():
            yield from workload.containers

    def selected(self, service: str) -> list[Workload]:
        """The workloads whose pods a Service of that name has."""
        found = self.of_kind("Service").get(service)
        return [
            workload
            for workload in self.workloads.values()
            if found and selects(found["spec"]["selector"], workload.labels)
        ]


def selects(match_labels: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether all of the labels that are asked for are there."""
    return bool(match_labels) and match_labels.items() <= labels.items()


def port_of(address: str) -> int:
    """The port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def of_image(target: str, variable: str) -> str:
    """The value of a variable in the image of a target of the Dockerfile; empty without one."""
    part = re.split(rf"^FROM .* AS {target}$", DOCKERFILE, flags=re.MULTILINE)[1].partition("\nFROM ")[0]
    found = re.search(rf"\b{variable}=(\S+)", part)
    return found[1] if found else ""


def is_of_bucket(container: Container) -> bool:
    """Whether a service has its models from a bucket."""
    repository = variable_name(SETTINGS[container.target], "repository")
    return str(container.environment.get(repository, "")).startswith("s3://")
