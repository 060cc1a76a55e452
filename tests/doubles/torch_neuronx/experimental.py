"""The placement function where it was before SDK 2.25; since then with a warning."""

import warnings
from typing import Any

from torch_neuronx import _placement
from torch_neuronx._versions import HAS_PLACEMENT

_NAMES = ("neuron_cores_context",)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'torch_neuronx.experimental' has no attribute {name!r}")
    if HAS_PLACEMENT:
        text = (
            f"In a future version torch_neuronx.experimental.{name} will be removed.  Call "
            f"torch_neuronx.{name} instead."
        )
        warnings.warn(text, stacklevel=2)
    return getattr(_placement, name)
