"""The errors of callers whose sequences end without outputs."""

from neuronpipe.core.errors import InternalError, Unavailable


def uncomputable() -> InternalError:
    """Returns the error of a caller whose sequence a back end could not compute."""
    return InternalError("the model could not compute this input")


def stopping() -> Unavailable:
    """Returns the error of waiting callers when a model, or the executor, ends."""
    return Unavailable("the neuron-executor is stopping")
