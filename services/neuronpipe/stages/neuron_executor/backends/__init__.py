"""The back ends by name. Each is imported only if a bundle needs it, because each has its own runtime."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import cast

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendRequest
from neuronpipe.stages.neuron_executor.runtimes.decoder import GATHERED, MODEL, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.decoders import load
from neuronpipe.stages.neuron_executor.runtimes.parts import PIPELINED

BACKENDS = {
    "openvino": "neuronpipe.stages.neuron_executor.backends.openvino:OpenVinoBackend",
    "fake": "neuronpipe.stages.neuron_executor.backends.fake:FakeBackend",
    "neuronx": "neuronpipe.stages.neuron_executor.backends.neuronx:NeuronxBackend",
    "torch": "neuronpipe.stages.neuron_executor.backends.torch:TorchBackend",
}
_SLOTS = "neuronpipe.stages.neuron_executor.backends.neuronx"
# Back ends whose cores take one batch at a time, because they have no device for which a second one could be prepared.
ONE_IN_FLIGHT = ("openvino",)
GENERATING = ("openvino", "torch", "neuronx")
_INSTALL = "install it with: pip install 'neuronpipe[executor-{name}]'"
_INSTALL_SDK = "it is of AWS's Neuron SDK, which docs/neuron.md says how to install"
_SDK_MODULES = ("torch_neuronx", "torch_xla", "neuronxcc", "libneuronxla")


def load_decoder(name: str, request: BackendRequest, *, max_tokens: int, max_bytes: int) -> DecoderModel:
    """Loads a compiled model that generates, with a key-value cache for `max_tokens` that takes at most `max_bytes`.

    On Neuron the cache has its compiled size. Raises SetupError.
    """
    if name not in GENERATING:
        raise SetupError(
            f"back end {name!r} does not generate text; compile the model with --backend {' or '.join(GENERATING)}"
        )
    with _explained_imports(name):
        if not find_spec("llguidance"):  # imported only when the first text with a grammar comes
            raise ModuleNotFoundError(name="llguidance")
        if name == "neuronx":
            return cast("DecoderModel", importlib.import_module(_SLOTS).load_slots(request))
        files, properties = request.files, request.properties
        models = [path for path in files if path.stem in (MODEL, GATHERED) and path.suffix != ".bin"]
        if not models:
            raise SetupError(
                f"model {request.spec.name!r}: its {name} artefact names no file of a model; compile it again"
            )
        return load(name, models[0], properties, threads=request.threads, max_tokens=max_tokens, max_bytes=max_bytes)


def load_backend(name: str, request: BackendRequest) -> Backend:
    """Loads a compiled model on the back end of that name. Raises SetupError."""
    if name not in BACKENDS:
        raise SetupError(f"back end {name!r} is not known; there are: {', '.join(BACKENDS)}")
    if request.pipeline_cores > 1 and name not in PIPELINED:
        raise SetupError(
            f"model {request.spec.name!r}: in {request.pipeline_cores} parts, which {name!r} does not compute"
        )
    if name in ONE_IN_FLIGHT and request.in_flight != 1:
        raise SetupError(
            f"in_flight: {request.in_flight}, the back end {name!r} takes one batch at a time on a core; leave it out"
        )
    module_name, _, class_name = BACKENDS[name].partition(":")
    with _explained_imports(name):
        return cast("Backend", getattr(importlib.import_module(module_name), class_name)(request))


@contextmanager
def _explained_imports(name: str) -> Iterator[None]:
    """Raises SetupError if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        advice = _INSTALL_SDK if package in _SDK_MODULES else _INSTALL.format(name=name)
        raise SetupError(f"back end {name!r} needs {package}; {advice}") from error
    except ImportError as error:  # the package is installed, but a system library that it needs is missing
        raise SetupError(f"back end {name!r}: {error.name or 'its library'} cannot be loaded: {error}") from error
