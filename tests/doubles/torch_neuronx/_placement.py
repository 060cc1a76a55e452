"""On which cores a model is loaded. Contexts are the process's, not a thread's: a load in another thread at the time is
misplaced.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch_neuronx import _runtime

_contexts: list[tuple[int, int, bool]] = []


def current() -> tuple[int, int, bool]:
    """Start, count, and whether all cores: of the innermost context, or the core used least."""
    return _contexts[-1] if _contexts else (-1, -1, False)


@contextlib.contextmanager
def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> Iterator[None]:
    """For loads within."""
    _runtime.runtime().place(start_nc, nc_count)  # refuses now what cannot be
    with _context(start_nc, nc_count, False):
        yield


@contextlib.contextmanager
def multicore_context() -> Iterator[None]:
    """For loads within: on all cores."""
    with _context(-1, -1, True):
        yield


@contextlib.contextmanager
def _context(start: int, count: int, is_multicore: bool) -> Iterator[None]:
    _contexts.append((start, count, is_multicore))
    try:
        yield
    finally:
        _contexts.pop()


def set_neuron_cores(trace: Any, start_nc: int = -1, nc_count: int = -1) -> None:
    """Unloads a model and loads it elsewhere. Does nothing for a plain module."""
    _runtime.runtime().place(start_nc, nc_count)
    _reload(trace, start_nc, nc_count, False)


def set_multicore(trace: Any) -> None:
    """Unloads a model and loads it on all cores."""
    _reload(trace, -1, -1, True)


def _reload(trace: Any, start: int, count: int, is_multicore: bool) -> None:
    from torch_neuronx._model import model_of

    model = model_of(trace)
    if model is not None:
        model.unload()
        model.load(start, count, is_multicore=is_multicore)
