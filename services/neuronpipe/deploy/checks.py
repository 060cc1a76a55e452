"""What is wrong with a service's deployment, found before it starts, in its container: settings, models, devices and
limits.
"""

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
from neuronpipe.gateway.settings import NEAR, GatewaySettings
from neuronpipe.platform.process.settings import ProcessSettings, ServerSettings, StageSettings
from neuronpipe.serve.settings import PipelineProcessSettings
from neuronpipe.stages.neuron_executor.runtimes.host import cpu_threads, memory_limit
from neuronpipe.stages.neuron_executor.runtimes.neuron import CORES_PER_DEVICE, core_count, runtime_environment
from neuronpipe.stages.neuron_executor.runtimes.parts import check_parts
from neuronpipe.stages.settings import EngineSettings, NeuronExecutorSettings

# The folder of devices, and what the files of each back end's are called there.
DEVICE_FOLDER = Path("/dev")
_DEVICES = {"neuronx": "neuron", "torch": "nvidia"}
_PACKAGES = {"neuronx": "torch_neuronx", "openvino": "openvino", "torch": "torch"}
_COMPONENTS = "deploy one of the components cpu, gpu and neuron"
# Less than any executor took without its weights: 313 MB with OpenVINO (docs/benchmarks/README.md, Start and memory).
_EXECUTOR_BYTES = 128 << 20
_MIB = 1 << 20


@dataclass
class Findings:
    """What was found. `models`: those that would be served."""

    problems: list[str] = field(default_factory=list)
    models: list[ModelKey] = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the SetupError of the block as a problem."""
        try:
            yield
        except SetupError as error:
            self.problems.append(str(error))


def check_deployment(
    settings: ProcessSettings,
    wanted: Sequence[str] = (),
    limit_bytes: Callable[[], int | None] = memory_limit,
) -> Findings:
    """Looks at everything that a service needs at its start, but for other services and the content of weights.

    `wanted`: models that must be there, as NAME or NAME/VERSION.
    """
    found = Findings()
    with found.kept():
        _check_files(settings)
    if not isinstance(settings, ServerSettings):
        return found
    bundles = _read_bundles(settings, found)
    found.models = [ModelKey(*bundle.key) for bundle in bundles]
    defaults = settings.default_models if isinstance(settings, GatewaySettings) else ""
    for name in (*wanted, *filter(None, map(str.strip, defaults.split(",")))):
        with found.kept():
            _check_model(name, found.models, settings)
    if bundles and (engine := _engine_of(settings)):
        _check_executor(engine, bundles, found, limit_bytes())
        if settings.trusted_keys:
            _check_room(bundles, found)
    return found


def _check_files(settings: ProcessSettings) -> None:
    """Reads certificates and what says who may call. Raises SetupError."""
    from neuronpipe.platform.tls import watched_tls

    if files := settings.tls_files:
        watched_tls(files, "server")
    if isinstance(settings, StageSettings):
        _ = settings.allowed_names
    if isinstance(settings, GatewaySettings):
        from neuronpipe.gateway.access import access_by

        access_by(settings, Telemetry())
        if files := settings.stage_tls_files:
            watched_tls(files, "client")


def _read_bundles(settings: ServerSettings, found: Findings) -> list[Bundle]:
    bundles = []
    with found.kept():
        repository = live_repository(settings, with_artifacts=_engine_of(settings) is not None)
        for key in sorted(repository.desired):
            with found.kept():
                bundles.append(repository.take(key))
        if not repository.desired:
            raise SetupError(f"{settings.repository}: its registry has no approved version; see neuronpipe registry")
    return bundles


def _check_model(name: str, models: Sequence[ModelKey], settings: ServerSettings) -> None:
    if name not in {part for key in models for part in (key.name, f"{key.name}/{key.version}")}:
        there = ", ".join(f"{key.name}/{key.version}" for key in models) or "none"
        raise SetupError(f"model {name}: is not served from {settings.repository}; served are: {there}")


def _engine_of(settings: ProcessSettings) -> EngineSettings | None:
    """The settings of the executor in this process, if it has one."""
    if isinstance(settings, PipelineProcessSettings):
        return settings if settings.executor_target == NEAR else None
    return settings if isinstance(settings, NeuronExecutorSettings) else None


def _check_executor(
    settings: EngineSettings, bundles: Sequence[Bundle], found: Findings, limit_bytes: int | None
) -> None:
    names = set()
    sizes: dict[str, int] = {}
    for bundle in bundles:
        with found.kept():
            artifact = bundle.artifact(settings.backend)
            names.add(artifact.backend)
            if settings.core_count:
                leaves_none = artifact.backend == "neuronx"
                check_parts(bundle.spec.name, artifact.pipeline_cores, settings.core_count, leaves_none=leaves_none)
            sizes[f"{bundle.spec.name}/{bundle.spec.version}"] = _size(bundle, artifact.files)
    with found.kept():
        _check_devices(names)
    for name in sorted(names):
        with found.kept():
            _check_back_end(name, settings)
    with found.kept():
        makes_room = settings.models_on_demand and settings.max_model_memory_bytes
        _check_memory(sizes, "openvino" in names and not makes_room, limit_bytes)


def _check_devices(names: set[str]) -> None:
    """Devices of a back end on which no model runs are those of a second back end in the same manifests."""
    used = ", ".join(sorted(names))
    for name in _DEVICES.keys() - names:
        if names and (devices := _devices(name)):
            raise SetupError(
                f"two back ends: the container has {devices[0]}, a device of the back end {name}, and its models run "
                f"on {used}; {_COMPONENTS}"
            )


def _devices(name: str) -> list[str]:
    prefix = _DEVICES[name]
    files = DEVICE_FOLDER.glob(f"{prefix}*")
    return sorted(str(path) for path in files if path.name.removeprefix(prefix).isdigit())


def _check_back_end(name: str, settings: EngineSettings) -> None:
    """Raises SetupError for a back end that is not installed, and for more cores than it has here."""
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
        if there := len(_devices(name)) * CORES_PER_DEVICE:
            _check_cores(cores, there, "NeuronCores")
    elif name == "torch" and (there := len(_devices(name))):
        _check_cores(cores, there, "GPUs")


def _check_cores(cores: int, there: int, what: str) -> None:
    if cores > there:
        raise SetupError(f"cores: {cores}, but the container has {there} {what}; ask for as many in its resources")


def _check_memory(sizes: dict[str, int], holds_all: bool, limit_bytes: int | None) -> None:
    """Weights on CPUs are all in memory, unless models make room for others; those for devices pass through it, one
    model after the other.
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
    """Bytes of a bundle's files. Raises SetupError for one that is missing."""
    try:
        return sum((bundle.folder / file).stat().st_size for file in files)
    except FileNotFoundError as error:
        raise SetupError(f"{error.filename}: is missing; compile the model again") from error


def _check_room(bundles: Sequence[Bundle], found: Findings) -> None:
    """Files of signed bundles are copied, one bundle after the other."""
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    for bundle in bundles:
        with found.kept():
            needed = max(_size(bundle, artifact.files) for artifact in bundle.manifest.artifacts)
            if free_bytes < needed:
                raise SetupError(
                    f"{folder}: has {free_bytes // _MIB} MiB, and the files of {bundle.spec.name}, signed, are "
                    f"copied there to load them: {-(-needed // _MIB)} MiB; make it larger, or let TMPDIR name another"
                )
