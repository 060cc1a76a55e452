"""Warms up a model: runs it on every core, so that everything is allocated, and measures its batch times."""

import time

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, CoreLost, compute
from neuronpipe.stages.neuron_executor.batching.batch_time import BatchTime, BatchTimes
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.tasks.inputs.kind import input_kind


async def warm_up(backend: Backend, bundle: Bundle, device: DeviceScheduler) -> BatchTimes:
    """Runs every bucket, or two different batches, on every core, in turn with the device's other models.

    Batches that run alone begin with the same estimate, which then follows their own times. Raises SetupError if one
    cannot run, or if no core is left.
    """
    warming = _WarmUp(backend, bundle, device)
    estimates = [BatchTime()]
    if backend.cores > 1 and backend.buckets is None:
        estimates.append(BatchTime())
    try:
        for rows, tokens in warming.shapes():
            for core in range(backend.cores):
                await warming.run_on(core, rows, tokens)
            # The faster one, because all services of a machine may start at once.
            seconds = min([await warming.time(rows, tokens) for _ in range(2)])
            for estimate in estimates:
                estimate.anchor(rows * tokens, seconds)
    except BackendError as error:
        raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
    return BatchTimes(estimates[0], estimates[-1])


class _WarmUp:
    """The warm-up of one model. Raises BackendError, and CoreLost with the last core only."""

    def __init__(self, backend: Backend, bundle: Bundle, device: DeviceScheduler) -> None:
        self._backend, self._name, self._device = backend, bundle.spec.name, device
        self._kind = input_kind(bundle.spec)

    def shapes(self) -> list[tuple[int, int]]:
        """Rows and padded tokens of each batch."""
        if self._backend.buckets:
            return [(bucket.batch, bucket.tokens) for bucket in self._backend.buckets.buckets]
        return [(rows, self._backend.round_tokens(tokens)) for rows, tokens in self._kind.warm_up_shapes()]

    async def run_on(self, core: int, rows: int, tokens: int) -> float | None:
        """Runs the shortest sequences. Returns the seconds that they took; None if the core is lost."""
        left = [one for one in range(self._backend.cores) if not self._device.cores.is_lost(one)]
        if core not in left:
            return None
        inputs = self._kind.pad([self._kind.shortest()] * rows, tokens)
        try:
            async with self._device.reserved([core]):
                began_s = time.monotonic()
                await compute(self._backend, core, inputs)
                return time.monotonic() - began_s
        except CoreLost as fault:
            self._device.lose(core, self._name, fault)
            if not self._device.cores.left:
                raise
            return None

    async def time(self, rows: int, tokens: int) -> float:
        """The seconds that a batch takes on the first core that is not lost."""
        for core in range(self._backend.cores):
            if (seconds := await self.run_on(core, rows, tokens)) is not None:
                return seconds
        raise CoreLost("no core is left")
