"""Runs a model on every core, so that the first request finds everything allocated, and learns how long batches take."""

import time
from dataclasses import dataclass

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.model import ModelSpec
from neuronpipe.neuron_executor.backends.base import Backend, BackendError, CoreLost
from neuronpipe.neuron_executor.batch_time import BatchTime
from neuronpipe.neuron_executor.batching import pad, shortest_sequence

# Where there are no buckets: as apart as costs little, to tell what a batch costs from what a token costs.
_LENGTHS = (3, 64)
# Of images, which all have one length, that many rows.
_IMAGES = (1, 2)


@dataclass(frozen=True, slots=True)
class Warmth:
    """How long a batch takes beside others, and alone, which is the same thing where there is one core; and the cores that are lost."""

    batch_time: BatchTime
    lone_batch_time: BatchTime
    lost: frozenset[int]


async def warm_up(backend: Backend, bundle: Bundle) -> Warmth:
    """Runs every bucket on every core, or a short and a long sequence. Raises SetupError where one cannot run, or no core is left."""
    cores = _Cores(backend, bundle)
    batch_time = BatchTime()
    lone_batch_time = BatchTime() if backend.cores > 1 and backend.buckets is None else batch_time
    try:
        for rows, tokens in _shapes(backend, bundle.spec):
            for core in range(backend.cores):
                await cores.run_on(core, rows, tokens)
            for is_alone, estimate in ((False, batch_time), (True, lone_batch_time)):
                if is_alone:
                    await cores.time(rows, tokens, is_alone=True)
                # The quicker one: all services of a machine may start at once.
                estimate.anchor(rows * tokens, min([await cores.time(rows, tokens, is_alone=is_alone) for _ in range(2)]))
    except BackendError as error:
        raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
    return Warmth(batch_time, lone_batch_time, frozenset(cores.lost))


def _shapes(backend: Backend, spec: ModelSpec) -> list[tuple[int, int]]:
    """Rows and tokens of each batch."""
    if backend.buckets:
        return [(bucket.batch, bucket.tokens) for bucket in backend.buckets.buckets]
    if spec.image:
        return [(rows, backend.round_tokens(spec.image.tokens)) for rows in _IMAGES]
    return [(1, backend.round_tokens(min(length, spec.max_tokens))) for length in _LENGTHS]


class _Cores:
    """The cores of a model that is warmed up. Raises BackendError; CoreLost with the last one only."""

    def __init__(self, backend: Backend, bundle: Bundle) -> None:
        self._backend, self._spec = backend, bundle.spec
        self.lost: set[int] = set()

    async def run_on(self, core: int, rows: int, tokens: int, *, is_alone: bool = False) -> bool:
        """Runs the shortest sequences. Returns whether the core is not lost."""
        if core in self.lost:
            return False
        inputs = pad([shortest_sequence(self._spec)] * rows, tokens, self._spec)
        try:
            await self._backend.run(core, inputs, is_alone=is_alone)
        except CoreLost as fault:
            self.lost.add(core)
            cores_left = self._backend.cores - len(self.lost)
            log_fault("core lost", fault, model=self._spec.name, core=core, cores_left=cores_left)
            if not cores_left:
                raise
        return core not in self.lost

    async def time(self, rows: int, tokens: int, *, is_alone: bool) -> float:
        """The seconds that a batch takes on the first core that is not lost."""
        while True:
            core = next(core for core in range(self._backend.cores) if core not in self.lost)
            began_s = time.monotonic()
            if await self.run_on(core, rows, tokens, is_alone=is_alone):
                return time.monotonic() - began_s
