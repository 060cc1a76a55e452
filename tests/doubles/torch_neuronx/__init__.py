"""A contract double of torch_neuronx; see README.md one folder up. Public names, and their signatures, are those that
are documented.
"""

from typing import Any

from torch_neuronx import _runtime
from torch_neuronx._extras import BucketModelConfig as BucketModelConfig
from torch_neuronx._extras import DataParallel as DataParallel
from torch_neuronx._extras import PartitionerConfig as PartitionerConfig
from torch_neuronx._extras import analyze as analyze
from torch_neuronx._extras import bucket_model_trace as bucket_model_trace
from torch_neuronx._model import async_load as async_load
from torch_neuronx._model import dynamic_batch as dynamic_batch
from torch_neuronx._model import lazy_load as lazy_load
from torch_neuronx._model import move_trace_to_device as move_trace_to_device
from torch_neuronx._model import replace_weights as replace_weights
from torch_neuronx._trace import trace as trace
from torch_neuronx._versions import HAS_PLACEMENT, VERSION

__version__ = VERSION

if HAS_PLACEMENT:
    from torch_neuronx._placement import multicore_context as multicore_context
    from torch_neuronx._placement import neuron_cores_context as neuron_cores_context
    from torch_neuronx._placement import set_multicore as set_multicore
    from torch_neuronx._placement import set_neuron_cores as set_neuron_cores

del HAS_PLACEMENT, VERSION


def __getattr__(name: str) -> Any:
    if name == "experimental":
        import importlib

        return importlib.import_module("torch_neuronx.experimental")
    raise AttributeError(f"module 'torch_neuronx' has no attribute {name!r}")


_runtime.patch_load()
