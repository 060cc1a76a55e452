"""The back ends by name. Each is imported only where a bundle needs it, as each has a runtime of its own."""

import importlib
from typing import cast

from neuronpipe.core.errors import SetupError
from neuronpipe.neuron_executor.backends.base import Backend, LoadRequest

BACKENDS = {
    "openvino": "neuronpipe.neuron_executor.backends.openvino:OpenVinoBackend",
    "fake": "neuronpipe.neuron_executor.backends.fake:FakeBackend",
    "neuronx": "neuronpipe.neuron_executor.backends.neuronx:NeuronxBackend",
    "torch": "neuronpipe.neuron_executor.backends.torch:TorchBackend",
}


def load_backend(name: str, request: LoadRequest) -> Backend:
    """Loads a compiled model on the back end of that name. Raises SetupError."""
    if name not in BACKENDS:
        raise SetupError(f"back end {name!r} is not known; there are: {', '.join(BACKENDS)}")
    if request.cores_per_replica != 1:
        raise SetupError(
            f"cores_per_replica: {request.cores_per_replica}, the back end {name!r} computes a replica on one core; torch-neuronx traces "
            "no model that needs several (docs/neuron.md, Core groups)"
        )
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SetupError(f"back end {name!r} needs {error.name}; install it with: pip install 'neuronpipe[executor-{name}]'") from error
    return cast("Backend", getattr(module, class_name)(request))
