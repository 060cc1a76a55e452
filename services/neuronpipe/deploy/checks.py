"""Finds faults of a deployment in its container before the service starts: settings, models, devices, limits."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.units import words_of
from neuronpipe.gateway.settings import NEAR
from neuronpipe.platform.process.settings import ServerSettings, ServiceSettings, StageSettings
from neuronpipe.serve.settings import PipelineProcessSettings
from neuronpipe.stages.neuron_executor.memory import memory_shortage
from neuronpipe.stages.neuron_executor.runtimes.host import cpu_threads, memory_limit
from neuronpipe.stages.neuron_executor.runtimes.neuron import CORES_PER_DEVICE, core_count, runtime_environment
from neuronpipe.stages.neuron_executor.runtimes.parts import check_parts
from neuronpipe.stages.settings import EngineSettings, NeuronExecutorSettings

# The folder of devices, and the names of each back end's device files in it.
DEVICE_FOLDER = Path("/dev")
_DEVICES = {"neuronx": "neuron", "torch": "nvidia"}
_PACKAGES = {"neuronx": "torch_neuronx", "openvino": "openvino", "torch": "torch"}
_COMPONENTS = "deploy one of the components cpu, gpu and neuron"
# Less than any executor took without its weights; OpenVINO's took 313 MB (docs/benchmarks/README.md, Start and memory).
_EXECUTOR_BYTES = 128 << 20
_MIB = 1 << 20


@dataclass
class Findings:
    """The findings. `warnings`: problems that may come later. `models`: the models that would be served."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    models: list[ModelKey] = field(default_factory=list)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keeps the SetupError of the block as a problem."""
        try:
            yield
        except SetupError as error:
            self.problems.append(str(error))


def check_deployment(
    settings: ServiceSettings, wanted: Sequence[str] = (), limit_bytes: Callable[[], int | None] = memory_limit
) -> Findings:
    """Checks everything that a service needs at its start, except other services and the content of weights."""
    findings = Findings()
    with findings.recorded():
        _check_files(settings)
    if not isinstance(settings, ServerSettings):
        return findings
    bundles = _read_bundles(settings, findings)
    findings.models = [ModelKey(*bundle.key) for bundle in bundles]
    defaults = settings.gateway.http.default_models if isinstance(settings, PipelineProcessSettings) else ""
    for name in (*wanted, *words_of(defaults)):
        with findings.recorded():
            _check_model(name, findings.models, settings.models.repository)
    if bundles and (engine := _engine_of(settings)):
        _check_executor(engine, bundles, findings, limit_bytes())
        if settings.models.trusted_keys:
            _check_room(bundles, findings)
    return findings


def _check_files(settings: ServiceSettings) -> None:
    """Reads certificates and the settings of callers' rights. Raises SetupError."""
    from neuronpipe.platform.tls import watched_tls

    if files := settings.tls.files:
        watched_tls(files, "server")
    if isinstance(settings, StageSettings):
        _ = settings.allowed_names
    if isinstance(settings, PipelineProcessSettings):
        from neuronpipe.gateway.access import access_by

        access_by(settings.gateway, settings.process, settings.tls, settings.redis, Telemetry())
        if files := settings.gateway.stage_tls.files(settings.tls):
            watched_tls(files, "client")


def _read_bundles(settings: ServerSettings, findings: Findings) -> list[Bundle]:
    bundles = []
    with findings.recorded():
        repository = live_repository(settings.models, with_artifacts=_engine_of(settings) is not None)
        for key in sorted(repository.desired):
            with findings.recorded():
                bundles.append(repository.take(key))
        if not repository.desired:
            raise SetupError(
                f"{settings.models.repository}: its registry has no approved version; see neuronpipe registry"
            )
    return bundles


def _check_model(name: str, models: Sequence[ModelKey], repository: str) -> None:
    if name not in {part for key in models for part in (key.name, f"{key.name}/{key.version}")}:
        served = ", ".join(f"{key.name}/{key.version}" for key in models) or "none"
        raise SetupError(f"model {name}: is not served from {repository}; served are: {served}")


def _engine_of(settings: ServiceSettings) -> EngineSettings | None:
    """Returns the settings of the executor in this process, if it is here."""
    if isinstance(settings, PipelineProcessSettings):
        return settings.executor if settings.gateway.executor_target == NEAR else None
    return settings.executor if isinstance(settings, NeuronExecutorSettings) else None


def _check_executor(
    settings: EngineSettings, bundles: Sequence[Bundle], findings: Findings, limit_bytes: int | None
) -> None:
    names = set()
    sizes: dict[str, int] = {}
    for bundle in bundles:
        with findings.recorded():
            artifact = bundle.artifact(settings.backend)
            names.add(artifact.backend)
            if settings.core_count:
                leaves_none = artifact.backend == "neuronx"
                check_parts(bundle.spec.name, artifact.pipeline_cores, settings.core_count, leaves_none=leaves_none)
            sizes[f"{bundle.spec.name}/{bundle.spec.version}"] = _size(bundle, artifact.files)
    with findings.recorded():
        _check_devices(names)
    for name in sorted(names):
        with findings.recorded():
            _check_back_end(name, settings)
    with findings.recorded():
        makes_room = settings.models_on_demand and settings.max_model_memory_bytes
        _check_memory(sizes, "openvino" in names and not makes_room, limit_bytes)
    if not findings.problems and (shortage := memory_shortage(bundles, settings, limit_bytes)):
        findings.warnings.append(shortage)


def _check_devices(names: set[str]) -> None:
    """Raises SetupError if no model runs on the back end of the devices: the manifests then combine two back ends."""
    used = ", ".join(sorted(names))
    for name in _DEVICES.keys() - names:
        if names and (devices := _devices(name)):
            problem = f"the container has {devices[0]}, a device of the back end {name}, and its models run on {used}"
            raise SetupError(f"two back ends: {problem}; {_COMPONENTS}")


def _devices(name: str) -> list[str]:
    prefix = _DEVICES[name]
    files = DEVICE_FOLDER.glob(f"{prefix}*")
    return sorted(str(path) for path in files if path.name.removeprefix(prefix).isdigit())


def _check_back_end(name: str, settings: EngineSettings) -> None:
    """Raises SetupError if a back end is not installed, or needs more cores than the container has."""
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        raise SetupError(
            f"back end {name}: {package} is not in this image; {_COMPONENTS}, which sets image and back end"
        )
    cores = settings.core_count
    if name == "openvino":
        cpu_threads(settings.threads, cores)
    elif name == "neuronx":
        core_count(cores, os.environ | runtime_environment(settings.cores, os.environ))
        if present := len(_devices(name)) * CORES_PER_DEVICE:
            _check_cores(cores, present, "NeuronCores")
    elif name == "torch" and (present := len(_devices(name))):
        _check_cores(cores, present, "GPUs")


def _check_cores(cores: int, present: int, devices: str) -> None:
    if cores > present:
        raise SetupError(f"cores: {cores}, but the container has {present} {devices}; ask for as many in its resources")


def _check_memory(sizes: dict[str, int], holds_all: bool, limit_bytes: int | None) -> None:
    """Raises SetupError if the memory limit is too low for the weights.

    On CPUs, all weights are in memory, unless models are unloaded to make room; weights for devices pass through the
    memory, one model after the other.
    """
    weights = sum(sizes.values()) if holds_all else max(sizes.values(), default=0)
    needed = _EXECUTOR_BYTES + weights
    if limit_bytes is not None and needed > limit_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        raise SetupError(
            f"memory: the container's limit is {limit_bytes // _MIB} MiB, and an executor of these models takes at "
            f"least {-(-needed // _MIB)} MiB, {-(-weights // _MIB)} for weights ({largest} has the most: "
            f"{-(-sizes[largest] // _MIB)}); raise the limit, or serve fewer models"
        )


def _size(bundle: Bundle, files: Sequence[str]) -> int:
    """Returns the bytes of a bundle's files. Raises SetupError if a file is missing."""
    try:
        return sum((bundle.folder / file).stat().st_size for file in files)
    except FileNotFoundError as error:
        raise SetupError(f"{error.filename}: is missing; compile the model again") from error


def _check_room(bundles: Sequence[Bundle], findings: Findings) -> None:
    """Finds a lack of space for the copies of signed bundles' files, which are copied one bundle after the other."""
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    for bundle in bundles:
        with findings.recorded():
            needed = max(_size(bundle, artifact.files) for artifact in bundle.manifest.artifacts)
            if free_bytes < needed:
                raise SetupError(
                    f"{folder}: has {free_bytes // _MIB} MiB, and the files of {bundle.spec.name}, signed, are "
                    f"copied there to load them: {-(-needed // _MIB)} MiB; make it larger, or let TMPDIR name another"
                )
