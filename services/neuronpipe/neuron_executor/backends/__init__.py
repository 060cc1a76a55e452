"""The back ends by name. Each is imported only if a bundle needs it, because each has its own runtime."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from neuronpipe.core.errors import SetupError
from neuronpipe.neuron_executor.backends.base import Backend, BackendRequest
from neuronpipe.runtimes.cpus import compute_pool
from neuronpipe.runtimes.decoder import DecoderModel

BACKENDS = {
    "openvino": "neuronpipe.neuron_executor.backends.openvino:OpenVinoBackend",
    "fake": "neuronpipe.neuron_executor.backends.fake:FakeBackend",
    "neuronx": "neuronpipe.neuron_executor.backends.neuronx:NeuronxBackend",
    "torch": "neuronpipe.neuron_executor.backends.torch:TorchBackend",
}
# Back ends whose cores take one batch at a time: they have no device for which a second batch could be prepared.
ONE_IN_FLIGHT = ("openvino",)
_INSTALL = "install it with: pip install 'neuronpipe[executor-{name}]'"
_INSTALL_SDK = "it is of AWS's Neuron SDK, which docs/neuron.md says how to install"
_SDK_MODULES = ("torch_neuronx", "torch_xla", "neuronxcc", "libneuronxla")


def load_decoder(
    name: str, files: list[Path], properties: Mapping[str, str], *, threads: int, max_tokens: int, max_bytes: int
) -> DecoderModel:
    """Loads a compiled model that generates, with a key-value cache. Raises SetupError."""
    if name != "openvino":
        raise SetupError(f"back end {name!r} does not generate text; compile the model with --backend openvino")
    try:
        from neuronpipe.runtimes.paged import MODEL, PagedModel
    except ModuleNotFoundError as error:
        raise SetupError(f"back end {name!r} needs {error.name}; {_INSTALL.format(name=name)}") from error
    model_file = next(path for path in files if path.name == f"{MODEL}.xml")
    properties = {**properties, "INFERENCE_NUM_THREADS": str(threads)}
    with compute_pool(1, "load") as pool:  # whose priority the runtime's own threads inherit
        return pool.submit(PagedModel, model_file, properties, max_tokens, max_bytes).result()


def load_backend(name: str, request: BackendRequest) -> Backend:
    """Loads a compiled model on the back end of that name. Raises SetupError."""
    if name not in BACKENDS:
        raise SetupError(f"back end {name!r} is not known; there are: {', '.join(BACKENDS)}")
    if request.cores_per_replica != 1:
        raise SetupError(
            f"cores_per_replica: {request.cores_per_replica}, the back end {name!r} computes a replica on one core; "
            "torch-neuronx traces "
            "no model that needs several (docs/neuron.md, Core groups)"
        )
    if name in ONE_IN_FLIGHT and request.in_flight != 1:
        raise SetupError(
            f"in_flight: {request.in_flight}, the back end {name!r} takes one batch at a time on a core; leave it out"
        )
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        return cast("Backend", getattr(importlib.import_module(module_name), class_name)(request))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        advice = _INSTALL_SDK if package in _SDK_MODULES else _INSTALL.format(name=name)
        raise SetupError(f"back end {name!r} needs {package}; {advice}") from error
    except ImportError as error:  # the package is installed, but a system library that it needs is missing
        raise SetupError(f"back end {name!r}: {error.name or 'its library'} cannot be loaded: {error}") from error
