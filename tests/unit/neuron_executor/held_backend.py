"""A back end whose batches wait for the test, so that a test decides what waits while what runs."""

import asyncio
import queue
import threading

from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.backends.base import LoadRequest
from neuronpipe.neuron_executor.backends.fake import FakeBackend

FAILING, NAN = 666, 777
# Only a broken test waits this long.
_PATIENCE_S = 20.0


class HeldBackend(FakeBackend):
    """FakeBackend, holding every batch until the test lets it run. `batches` has the token ids of each row, without padding.

    A row with the id FAILING makes its batch raise; one with the id NAN has outputs that are not a number.
    """

    def __init__(self, spec: ModelSpec, *, cores: int = 1, is_held: bool = True, device_time_s: float = 0) -> None:
        properties = {"failing_token_id": str(FAILING), "nan_token_id": str(NAN), "device_time_s": str(device_time_s)}
        super().__init__(LoadRequest(spec, [], properties, cores=cores, threads=0))
        self.batches: list[list[list[int]]] = []
        self.finished = 0
        self._begun: queue.SimpleQueue[list[list[int]]] = queue.SimpleQueue()
        self._permits = threading.Semaphore(0)
        self._is_held = is_held

    def run(self, core: int, inputs: Arrays) -> dict[str, Array]:
        """See Backend."""
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        batch = [row[kept == 1].tolist() for row, kept in zip(tokens, mask, strict=True)]
        self.batches.append(batch)
        self._begun.put(batch)
        if self._is_held and not self._permits.acquire(timeout=_PATIENCE_S):
            raise TimeoutError("the test let no batch run")
        outputs = super().run(core, inputs)
        self.finished += 1
        return outputs

    async def begun(self) -> list[list[int]]:
        """Waits until the next batch has begun."""
        return await asyncio.to_thread(self._begun.get, True, _PATIENCE_S)

    def let_run(self, batches: int | None = None) -> None:
        """Lets this many batches run; without a number those that are held and all to come."""
        if batches is None:
            self._is_held = False
        self._permits.release(batches or self.cores)
