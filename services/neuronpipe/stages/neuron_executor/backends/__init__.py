"""The back ends by name. Each is imported only if a bundle needs it, because each has its own runtime."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendRequest
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A back end and its abilities.

    - `path`: the module and the name of its Backend.
    - `process_bytes`: the memory of Python and the runtime, without models.
    - `generates`: its module has a function `load_decoder`, which loads a model that generates text.
    - `has_parts`: it computes models in parts, each on a core of its own.
    - `is_one_in_flight`: its cores take one batch at a time, because they have no device for which a second batch could
      be prepared.
    """

    path: str
    process_bytes: int
    generates: bool = False
    has_parts: bool = False
    is_one_in_flight: bool = False

    def load(self, request: BackendRequest) -> Backend:
        backend: Backend = resolve_name(self.path)(request)
        return backend

    def load_decoder(self, request: BackendRequest, max_tokens: int, max_bytes: int) -> DecoderModel:
        module: Any = import_module(self.path.partition(":")[0])
        model: DecoderModel = module.load_decoder(request, max_tokens=max_tokens, max_bytes=max_bytes)
        return model


_PACKAGE = "neuronpipe.stages.neuron_executor.backends"
BACKENDS = {
    "openvino": BackendEntry(
        f"{_PACKAGE}.openvino:OpenVinoBackend", 160 << 20, generates=True, has_parts=True, is_one_in_flight=True
    ),
    "fake": BackendEntry(f"{_PACKAGE}.fake:FakeBackend", 64 << 20),
    "neuronx": BackendEntry(f"{_PACKAGE}.neuronx:NeuronxBackend", 480 << 20, generates=True, has_parts=True),
    "torch": BackendEntry(f"{_PACKAGE}.torch:TorchBackend", 480 << 20, generates=True),
}
GENERATING = [name for name, entry in BACKENDS.items() if entry.generates]
WITH_PARTS = [name for name, entry in BACKENDS.items() if entry.has_parts]
_INSTALL = "install it with: pip install 'neuronpipe[executor-{name}]'"
_INSTALL_SDK = "it is of AWS's Neuron SDK, which docs/neuron.md says how to install"
_SDK_MODULES = ("torch_neuronx", "torch_xla", "neuronxcc", "libneuronxla")


def find_backend(name: str) -> BackendEntry:
    """Returns the entry of a back end. Raises SetupError if there is none of that name."""
    if name not in BACKENDS:
        raise SetupError(f"back end {name!r} is not known; there are: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def load_decoder(name: str, request: BackendRequest, *, max_tokens: int, max_bytes: int) -> DecoderModel:
    """Loads a compiled model that generates, with a key-value cache for `max_tokens` that takes at most `max_bytes`.

    On Neuron the cache has its compiled size. Raises SetupError.
    """
    entry = BACKENDS.get(name)
    if entry is None or not entry.generates:
        raise SetupError(
            f"back end {name!r} does not generate text; compile the model with --backend {' or '.join(GENERATING)}"
        )
    with _explained_imports(name):
        if not find_spec("llguidance"):  # imported only when the first text with a grammar comes
            raise ModuleNotFoundError(name="llguidance")
        return entry.load_decoder(request, max_tokens, max_bytes)


def load_backend(name: str, request: BackendRequest) -> Backend:
    """Loads a compiled model on the back end of that name. Raises SetupError."""
    entry = find_backend(name)
    if request.pipeline_cores > 1 and not entry.has_parts:
        raise SetupError(
            f"model {request.spec.name!r}: in {request.pipeline_cores} parts, which {name!r} does not compute"
        )
    if entry.is_one_in_flight and request.in_flight != 1:
        raise SetupError(
            f"in_flight: {request.in_flight}, the back end {name!r} takes one batch at a time on a core; leave it out"
        )
    with _explained_imports(name):
        return entry.load(request)


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
