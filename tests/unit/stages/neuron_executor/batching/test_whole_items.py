"""batching/whole_items.py: an item is a batch, whatever else waits and however many cores are idle."""

import asyncio

from tests.unit.stages.neuron_executor.scheduling import held_scheduler, queued


async def test_an_item_is_a_batch_of_its_own() -> None:
    async with held_scheduler() as system:
        system.scheduler.keep_items_whole()
        occupying = await system.occupy()
        items = [[[1, 2, 3], [4]], [[5, 6, 7]], [[8], [9, 10], [11, 12]]]
        callers = [system.submit(*item) for item in items]
        await queued()
        system.backend.let_run()
        for item in items:
            assert sorted(await system.backend.begun()) == sorted(item)
            system.backend.let_run()
        computed = await asyncio.gather(occupying, *callers)
        assert [len(one) for one in computed] == [1, 2, 1, 3]


async def test_an_item_is_not_shared_out_among_idle_cores() -> None:
    async with held_scheduler(cores=2) as system:
        system.scheduler.keep_items_whole()
        caller = system.submit([1], [2], [3], [4])
        assert len(await system.backend.begun()) == 4
        system.backend.let_run()
        assert len(await caller) == 4
