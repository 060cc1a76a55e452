"""Turns of batches in the parts of a model on several cores: one batch per part, and the compute time of each part."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.runtimes.parts import check_parts

# Time limit of waiting for a hanging batch, less than batch_limit_s, which would otherwise hit the waiting batch.
_LIMIT_S = 30.0


class PartTurns:
    """Pipelines of `parts` neighbouring cores. Batches of cores that are left over use the last pipeline."""

    def __init__(self, name: str, parts: int, cores: int) -> None:
        """Raises SetupError if there are fewer cores than the model needs."""
        check_parts(name, parts, cores, leaves_none=False)
        self.parts = parts
        self.pipelines = cores // parts
        self._locks = [threading.Lock() for _ in range(self.pipelines * parts)]
        self._ns = [0] * len(self._locks)

    @property
    def part_ns(self) -> Sequence[int]:
        return [sum(self._ns[part :: self.parts]) for part in range(self.parts)] if self.parts > 1 else ()

    def cores_of(self, core: int) -> range:
        """Returns the cores that a batch of this core passes, one for each part."""
        first = min(core // self.parts, self.pipelines - 1) * self.parts
        return range(first, first + self.parts)

    @contextlib.contextmanager
    def take(self, core: int) -> Iterator[None]:
        """Holds the core of a part for a block that computes a batch. A model in one part needs no turns.

        Raises CoreLost if the batch before does not end. This batch has then not begun.
        """
        if self.parts == 1:
            yield
            return
        if not self._locks[core].acquire(timeout=_LIMIT_S):
            raise CoreLost(f"core {core} hangs with another batch", has_begun=False)
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._ns[core] += time.monotonic_ns() - began_ns
            self._locks[core].release()
