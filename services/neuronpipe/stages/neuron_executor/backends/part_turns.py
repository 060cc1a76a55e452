"""The parts of a model over several cores: one batch at a time in each, and how long each has computed."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.runtimes.parts import check_parts

# Less than the executor's limit for a batch (batch_limit_s), which would take a batch that waits for one that hangs.
_LIMIT_S = 30.0


class PartTurns:
    """Each `parts` neighbouring cores are a pipeline. Cores that are left over are more batches in the last."""

    def __init__(self, name: str, parts: int, cores: int) -> None:
        """Raises SetupError for fewer cores than the model needs."""
        check_parts(name, parts, cores, leaves_none=False)
        self.parts = parts
        self.pipelines = cores // parts
        self._locks = [threading.Lock() for _ in range(self.pipelines * parts)]
        self._ns = [0] * len(self._locks)

    @property
    def part_ns(self) -> Sequence[int]:
        """See Backend."""
        return [sum(self._ns[part :: self.parts]) for part in range(self.parts)] if self.parts > 1 else ()

    def cores_of(self, core: int) -> range:
        """The cores that a batch of this core passes, one for each part."""
        first = min(core // self.parts, self.pipelines - 1) * self.parts
        return range(first, first + self.parts)

    @contextlib.contextmanager
    def take(self, core: int) -> Iterator[None]:
        """A block in which the core of a part computes a batch. A model in one part needs no turns.

        Raises CoreLost where the batch before does not end: this one has not begun.
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
