"""Cuts a batch's outputs into those of its sequences."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.core.errors import InternalError
from neuronpipe.core.model import OutputSpec
from neuronpipe.core.tensors import Array, Arrays


def cut(outputs: Arrays, row: int, tokens: int, specs: Sequence[OutputSpec]) -> dict[str, Array]:
    """One sequence's outputs without padding, copied so that they do not keep the batch alive."""
    arrays = {}
    for output in specs:
        without_padding = tuple(slice(tokens) if axis == "tokens" else slice(None) for axis in output.axes)
        arrays[output.name] = outputs[output.name][(row, *without_padding)].copy()
    return arrays


def fault_of(arrays: Arrays) -> InternalError | None:
    """The error of a sequence with outputs that are NaN or infinite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            return InternalError(f"the model's output {name!r} is not finite for this input")
    return None
