"""bulk/transform/whole_items.py: an item is a batch, whatever waits, in shapes of the menu and on one core."""

import asyncio

from neuronpipe.bulk.transform.whole_items import WholeItemModel
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.scheduling import held_scheduler, queued

_SPEC = model_spec("question_answering", max_tokens=128)
_LIMITS = Limits(max_batch_size=32, max_batch_tokens=8192, max_queue_sequences=1000)


async def test_an_item_is_a_batch_of_its_own() -> None:
    async with held_scheduler(model_class=WholeItemModel) as system:
        occupying = await system.occupy()
        items = [[[1, 2, 3], [4]], [[5, 6, 7]], [[8], [9, 10], [11, 12]]]
        callers = [system.submit(*item) for item in items]
        await queued()
        system.backend.let_run()
        for item in items:
            assert sorted(await system.backend.begun()) == sorted(item)
            system.backend.let_run()
        computed = await asyncio.gather(occupying, *callers)
        assert [len(batch) for batch in computed] == [1, 2, 1, 3]


async def test_an_item_is_not_shared_out_among_idle_cores() -> None:
    async with held_scheduler(model_class=WholeItemModel, cores=2) as system:
        caller = system.submit([1], [2], [3], [4])
        assert len(await system.backend.begun()) == 4
        system.backend.let_run()
        assert len(await caller) == 4


async def test_sequences_of_an_item_that_is_kept_whole_have_rows_of_the_menu() -> None:
    async with held_scheduler(
        model_class=WholeItemModel, limits=_LIMITS, spec=_SPEC, menu=ShapeMenu(_SPEC, 512), is_held=False
    ) as system:
        computed = [await system.submit(*([number] * 48 for number in range(1, count + 1))) for count in (3, 5)]
        computed.append(await system.submit([9] * 20))
        assert [len(batch) for batch in computed] == [3, 5, 1]
        assert system.backend.computed_shapes == [(4, 48), (8, 48), (1, 24)]
        # Unused rows repeat the first sequence.
        assert [row[0] for row in system.backend.batches[0]] == [1, 2, 3, 1]
