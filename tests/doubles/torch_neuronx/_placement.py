"""On which cores a model is loaded. Contexts are the process's, not a thread's: a load in another thread at the time is
misplaced.
"""

import contextlib
from collections.abc import Iterator

from torch_neuronx import _runtime

_contexts: list[tuple[int, int]] = []


def current() -> tuple[int, int]:
    """Returns start and count of the innermost context; -1 for the least-used core."""
    return _contexts[-1] if _contexts else (-1, -1)


@contextlib.contextmanager
def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> Iterator[None]:
    """Places the models that are loaded within the block."""
    _runtime.runtime().place(start_nc, nc_count)  # refuses now what cannot be
    _contexts.append((start_nc, nc_count))
    try:
        yield
    finally:
        _contexts.pop()
