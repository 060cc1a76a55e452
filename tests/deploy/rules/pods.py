"""How pods run: ports, probes, settings, images, devices, rights, and how they end."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from neuronpipe.core.settings import fields_of, values_of, variable_name
from neuronpipe.gateway.held_items import MAX_HELD_BYTES
from tests.deploy.objects import (
    BACKENDS,
    BUILT,
    CALLED,
    DOCKERFILE,
    INFERENCE,
    SETTINGS,
    Container,
    Objects,
    is_of_bucket,
    of_image,
    port_of,
)

# platform/process/life.py: after the grace period, callers that come late get a second, and unloading ten.
_AFTER_GRACE_S = 11.0
# Kubernetes' default of progressDeadlineSeconds.
_PROGRESS_S = 600
# More than a service took without its caches: 82 MB with MiniLM (docs/benchmarks/README.md, Start and memory).
_PROCESS_BYTES = 128 << 20
# Settings of what services may hold besides: the formula of docs/deployment.md, Memory, without models. Messages that
# arrive, and answers that are not read, take as much each; tokens and pixels as well.
_MEMORY = {
    "gateway": ("max_receiving_bytes", "max_receiving_bytes", "result_cache_bytes"),
    "tokenizer": ("max_receiving_bytes", "max_receiving_bytes", "token_cache_bytes", "token_cache_bytes"),
    "neuron-executor": ("max_receiving_bytes", "max_receiving_bytes", "lone_graph_bytes"),
    "postprocessor": ("max_receiving_bytes", "max_receiving_bytes"),
}
_DEVICES = {device for _, device in BACKENDS.values() if device}


def ports_are_those_of_the_service(objects: Objects) -> Iterator[str]:
    """The port of gRPC is the one on which the image listens, the others are the settings'."""
    for container in objects.containers:
        if container.target not in SETTINGS or container.workload.is_job:
            continue
        kind = SETTINGS[container.target]
        listen = container.environment.get(variable_name(kind, "listen")) or of_image(
            container.target, variable_name(kind, "listen")
        )
        names = ("metrics", "scaler", "http") if container.target == "gateway" else ("metrics",)
        others = {name: container.setting(f"{name}_listen") for name in names}
        wanted = {"grpc": port_of(listen)} | {name: port_of(address) for name, address in others.items() if address}
        if container.ports != wanted:
            yield f"{container}: has the ports {container.ports}, and its settings {wanted}"


def probes_ask_for_what_exists(objects: Objects) -> Iterator[str]:
    """Start-up and liveness look at the process alone, readiness of a gateway at InferenceService. With TLS, probes are
    commands, since those of Kubernetes are plain.
    """
    for container in objects.containers:
        if container.workload.is_job:
            continue
        kinds = ["readinessProbe", "livenessProbe", *(["startupProbe"] if container.target else [])]
        for kind in kinds:
            probe = container.content.get(kind)
            if probe is None:
                yield f"{container}: has no {kind}"
            elif container.target:
                yield from (f"{container}, {kind}: {fault}" for fault in _probe_faults(container, kind, probe))


def _probe_faults(container: Container, kind: str, probe: Mapping[str, Any]) -> Iterator[str]:
    port, service, files = _asked(probe)
    if port not in container.ports.values():
        yield f"port {port} is none of the container's"
    of_gateway = container.target == "gateway" and kind == "readinessProbe"
    expected = (INFERENCE, None) if of_gateway and "exec" in probe else (INFERENCE,) if of_gateway else ("",)
    if service not in expected:
        yield f"asks for {service!r}"
    has_tls = bool(container.setting("tls_certificate"))
    if has_tls != ("exec" in probe):
        yield "is plain, and the port has TLS" if has_tls else "is a command, and the port has no TLS"
    for file in files:
        if not any(file.startswith(f"{path}/") for path in container.mounts):
            yield f"{file} is not mounted"


def _asked(probe: Mapping[str, Any]) -> tuple[int, str | None, list[str]]:
    """The port, the service (None: what `neuronpipe health` takes by default), and the files that are used."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", ""), []
    words = probe["exec"]["command"]
    given = dict(itertools.pairwise(words))
    files = [given[name] for name in ("--tls-ca", "--tls-certificate", "--tls-key") if name in given]
    return port_of(given["--target"]), given.get("--service"), files


def graces_fit(objects: Objects) -> Iterator[str]:
    """A pod gets longer to end than its preStop sleep, its requests and the end of the process take."""
    for workload in objects.workloads.values():
        for container in workload.containers:
            if container.target not in SETTINGS or workload.is_job:
                continue
            sleep_s = container.content.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            needed_s = sleep_s + float(container.setting("grace_s")) + _AFTER_GRACE_S
            given_s = workload.pod["terminationGracePeriodSeconds"]
            if given_s < needed_s:
                yield f"{workload}: gets {given_s} s to end, and may take {needed_s:g}"
            if container.target in CALLED and not sleep_s:
                yield f"{workload}: refuses calls before callers know that it ends: it has no preStop sleep"


def updates_wait_for_models(objects: Objects) -> Iterator[str]:
    """A Deployment is not given up while its pods may still start. A gateway is ready once all stages are."""
    starts_s = {
        container.workload.name: _longest_start_s(container)
        for container in objects.containers
        if container.target in CALLED
    }
    for container in objects.containers:
        if container.target in CALLED:
            needed_s = max(starts_s.values()) if container.target == "gateway" else starts_s[container.workload.name]
            given_s = container.workload.manifest["spec"].get("progressDeadlineSeconds", _PROGRESS_S)
            if given_s <= needed_s:
                yield f"{container.workload}: is given up after {given_s} s, and may take {needed_s} s to start"


def _longest_start_s(container: Container) -> int:
    probe = container.content.get("startupProbe", {})
    return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


def settings_exist(objects: Objects) -> Iterator[str]:
    """Every variable of ours is a setting of that service, with a value that it takes and that is not its default."""
    for container in objects.containers:
        kind = SETTINGS.get(container.target)
        given = {name: value for name, value in container.environment.items() if name.startswith("NEURONPIPE_")}
        given.pop("NEURONPIPE_API_KEY", None)  # of commands and workers, as a caller
        if kind is None:
            yield from (f"{container}: {name} is no setting of it" for name in given)
            continue
        fields = {variable_name(kind, field): field for field in fields_of(kind)}
        yield from (f"{container}: {name} is no setting of it" for name in given if name not in fields)
        known = {fields[name]: value for name, value in given.items() if name in fields}
        required = {"repository": "/repository"} if "repository" in fields_of(kind) else {}
        try:
            settings = kind.of(**required | known)
        except ValidationError as error:
            yield f"{container}: {'; '.join(problem['msg'] for problem in error.errors())}"
            continue
        values, defaults = values_of(settings), values_of(kind.of(**required))
        # grace_s stands beside the period that must be longer.
        for name in known.keys() - {"grace_s"}:
            if values[name] == defaults[name]:
                yield f"{container}: {name} has its default anyway"


def images_are_built(objects: Objects) -> Iterator[str]:
    """Images and tags are those of docker/, or the ones that the compose files use."""
    targets = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE))
    specs = [runtime["spec"] for runtime in objects.of_kind("ClusterServingRuntime").values()]
    images = [(str(container), container.content["image"]) for container in objects.containers]
    images += [("ClusterServingRuntime", container["image"]) for spec in specs for container in spec["containers"]]
    for where, image in images:
        ours = image.startswith(f"{BUILT['IMAGE_PREFIX']}/") and image.endswith(f":{BUILT['VERSION']}")
        name = image.partition("/")[2].partition(":")[0]
        if not (ours and name in targets) and image != BUILT["REDIS_IMAGE"]:
            yield f"{where}: nobody builds the image {image}"


def one_back_end_that_fits(objects: Objects) -> Iterator[str]:
    """Image, back end and device of executors belong together; whole NeuronCores, and whole CPUs for OpenVINO."""
    for container in objects.containers:
        if container.workload.name != "neuron-executor":
            continue
        resources = container.content["resources"]
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        backend, device = BACKENDS[container.target]
        if container.setting("backend") != backend:
            asked = container.setting("backend") or "none"
            yield f"{container}: image {container.target} is for the back end {backend}, not {asked}"
        found = _DEVICES & {*limits, *requests}
        if found != ({device} if device else set()):
            yield f"{container}: asks for {', '.join(sorted(found)) or 'no device'}, and its back end is {backend}"
        if device and (not str(limits.get(device)).isdigit() or requests.get(device, limits[device]) != limits[device]):
            yield f"{container}: {device} must be whole, with the request as the limit"
        if backend == "neuronx" and str(container.setting("cores")) != str(limits.get(device)):
            yield f"{container}: has {limits.get(device)} cores, and its setting is {container.setting('cores')}"
        if backend == "openvino" and not str(limits.get("cpu", "")).isdigit():
            yield f"{container}: OpenVINO's threads are the CPU limit, which must be whole: {limits.get('cpu')}"


_CHECKED = ("image", "env", "securityContext", "resources", "volumeMounts")


def checks_see_what_services_see(objects: Objects) -> Iterator[str]:
    """A check before a service is that service's, and has the image, settings, rights, limits and files of it."""
    for workload in objects.workloads.values():
        for check in workload.checks:
            [service] = workload.containers
            words = check.content.get("args", [])
            if words[:1] != ["check-deployment"] or words[-1:] != [service.target_service]:
                yield f"{check}: does not check {service.target_service}"
            for part in _CHECKED:
                if check.content.get(part) != service.content.get(part):
                    yield f"{check}: has another {part} than the service; list the component check last"


def pods_have_no_rights(objects: Objects) -> Iterator[str]:
    """Nobody is root, writes to the image, or has the token of an account; every container has requests and limits."""
    for workload in objects.workloads.values():
        context = workload.pod.get("securityContext", {})
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            yield f"{workload}: may run as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload}: has no seccomp profile"
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield f"{workload}: gets the token of its service account"
        if {"hostNetwork", "hostPID", "hostIPC"} & workload.pod.keys():
            yield f"{workload}: is in a namespace of the host"
        for volume in workload.volumes.values():
            if "hostPath" in volume:
                yield f"{workload}: mounts a folder of the host"
        for container in workload.containers:
            own = container.content.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{container}: has capabilities, or may get them"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{container}: may write to its file system"
            resources = container.content.get("resources", {})
            if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get(
                "limits", {}
            ):
                yield f"{container}: lacks requests of CPU and memory, or a limit of memory"


def services_refuse_before_memory_is_full(objects: Objects) -> Iterator[str]:
    """A service's limit of memory has room for its caches and for messages, so that it refuses what is too much before
    the kernel ends it. A volume in memory counts, too.
    """
    for container in objects.containers:
        if container.target not in _MEMORY or container.workload.is_job:
            continue
        volumes = (volume.get("emptyDir", {}) for volume in container.workload.volumes.values())
        in_memory = [volume["sizeLimit"] for volume in volumes if volume.get("medium") == "Memory"]
        needed = most_bytes(container.target, container.setting) + sum(map(_bytes, in_memory))
        if (limit := _bytes(container.content["resources"]["limits"]["memory"])) < needed:
            yield f"{container}: may take {needed} bytes of memory, and the limit is {limit}"


def most_bytes(target: str, setting: Callable[[str], Any]) -> int:
    """The most memory that a service takes without models, by its settings."""
    held = sum(int(setting(name)) for name in _MEMORY[target])
    return _PROCESS_BYTES + held + (MAX_HELD_BYTES if target == "gateway" else 0)


def _bytes(quantity: str | int) -> int:
    number, unit = re.fullmatch(r"([0-9.]+)([kKMGT]?i?)", str(quantity)).groups()  # type: ignore[union-attr]
    power = " kMGT".index(unit[:1].replace("K", "k") or " ")
    scale: int = (1024 if unit.endswith("i") else 1000) ** power
    return round(float(number) * scale)


def volumes_are_there(objects: Objects) -> Iterator[str]:
    """Every mount has a volume, files of settings are mounted, and services only read the repository. Where that is a
    bucket, they have a volume of their own for bundles, with room for as many as they keep.
    """
    for container in objects.containers:
        for path, mount in container.mounts.items():
            if mount["name"] not in container.workload.volumes:
                yield f"{container}: {path} mounts {mount['name']}, which is no volume"
        for name, value in container.environment.items():
            if str(value).startswith("/") and not any(Path(value).is_relative_to(path) for path in container.mounts):
                yield f"{container}: {name} is {value}, which is not mounted"
        needs = container.target in SETTINGS and "repository" in fields_of(SETTINGS[container.target])
        if needs and not container.workload.is_job and is_of_bucket(container):
            kept, room = int(container.setting("repository_cache_bytes")), _room(container)
            if kept > room:
                yield f"{container}: keeps {kept} bytes of bundles, and has room for {room}"
        elif needs and not container.workload.is_job:
            where = of_image(container.target, variable_name(SETTINGS[container.target], "repository"))
            if not container.mounts.get(where, {}).get("readOnly"):
                yield f"{container}: {where} is not mounted, or can be written to"
        if "/tmp" not in container.mounts and container.target:
            yield f"{container}: has no /tmp"


def _room(container: Container) -> int:
    """Bytes of the volume, of the pod alone, in which bundles are kept; 0 without one."""
    mount = container.mounts.get(str(container.setting("repository_cache")), {})
    limit = container.workload.volumes.get(mount.get("name", ""), {}).get("emptyDir", {}).get("sizeLimit", "0Gi")
    return int(limit.removesuffix("Gi")) << 30
