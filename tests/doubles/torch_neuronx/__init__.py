"""A contract double of torch_neuronx; see README.md one folder up. Public names, and their signatures, are those
that are documented; only what we use is here.
"""

from typing import Any

from torch_neuronx import _runtime
from torch_neuronx._model import move_trace_to_device as move_trace_to_device
from torch_neuronx._trace import trace as trace
from torch_neuronx._versions import HAS_PLACEMENT, VERSION

__version__ = VERSION

if HAS_PLACEMENT:
    from torch_neuronx._placement import neuron_cores_context as neuron_cores_context

del HAS_PLACEMENT, VERSION


def __getattr__(name: str) -> Any:
    if name == "experimental":
        import importlib

        return importlib.import_module("torch_neuronx.experimental")
    raise AttributeError(f"module 'torch_neuronx' has no attribute {name!r}")


_runtime.patch_load()
