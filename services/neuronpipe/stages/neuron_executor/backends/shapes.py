"""Checks the shapes of a batch where the runtime of a back end does not."""

from neuronpipe.core.tensors import Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendError


def check_shapes(inputs: Arrays) -> None:
    """Raises BackendError for inputs of tokens that differ in shape.

    OpenVINO 2026.4 with one thread computes them, with what is behind the shorter one in memory.
    """
    shapes = {array.shape for array in inputs.values() if array.ndim == 2}
    if len(shapes) > 1:
        raise BackendError(f"inputs of different shapes: {[array.shape for array in inputs.values()]}")
