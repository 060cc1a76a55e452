"""A back end whose batches wait for the test, so that a test decides what waits while what runs."""

import asyncio

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, CoreLost
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu

ENDLESS, FAILING, NAN, KILLING = 555, 666, 777, 888
# Only a broken test waits this long.
_PATIENCE_S = 20.0


class HeldBackend(FakeBackend):
    """FakeBackend, holding every batch until the test lets it run. `batches` has the token ids of each row, without
    padding.

    A row with the id ENDLESS makes its batch never end; one with the id FAILING makes it raise; one with the id NAN has
    outputs that are not a number; one with the id KILLING loses the core. Cores in `lost` are lost with their next
    batch. Those in `lost_before` are found to be lost before a batch begins.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        cores: int = 1,
        is_held: bool = True,
        in_flight: int = 1,
        buckets: tuple[Bucket, ...] = (),
        menu: ShapeMenu | None = None,
    ) -> None:
        properties = {"endless_token_id": str(ENDLESS), "failing_token_id": str(FAILING), "nan_token_id": str(NAN)}
        request = BackendRequest(spec, [], properties, cores=cores, threads=0, in_flight=in_flight, buckets=buckets)
        super().__init__(request)
        if menu:
            self.shapes = menu
        self.batches: list[list[list[int]]] = []
        # The core of each batch, and the cores that are no more.
        self.ran_on: list[int] = []
        self.lost: set[int] = set()
        self.lost_before: set[int] = set()
        self.computed_shapes: list[tuple[int, ...]] = []
        self.ran_alone: list[bool] = []
        self._begun: asyncio.Queue[list[list[int]]] = asyncio.Queue()
        self._permits = asyncio.Semaphore(0)
        self._is_held = is_held

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        """See Backend."""
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        batch = [row[kept == 1].tolist() for row, kept in zip(tokens, mask, strict=True)]
        self.batches.append(batch)
        self.ran_on.append(core)
        self.computed_shapes.append(tokens.shape)
        self.ran_alone.append(is_alone)
        self._begun.put_nowait(batch)
        if self._is_held:
            async with asyncio.timeout(_PATIENCE_S):
                await self._permits.acquire()
        if core in self.lost_before:
            raise CoreLost("a core that was lost already", has_begun=False)
        if core in self.lost or (tokens == KILLING).any():
            self.lost.add(core)
            raise CoreLost("a core that the test lost")
        return await super().compute(core, inputs, is_alone=is_alone)

    async def begun(self) -> list[list[int]]:
        """Waits until the next batch has begun."""
        async with asyncio.timeout(_PATIENCE_S):
            return await self._begun.get()

    def let_run(self, batches: int | None = None) -> None:
        """Lets this many batches run; without a number those that are held and all to come."""
        if batches is None:
            self._is_held = False
        for _ in range(batches or self.cores * self.in_flight):
            self._permits.release()
