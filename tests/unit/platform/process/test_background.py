"""Tasks beside a block."""

import asyncio

import pytest

from neuronpipe.platform.process.background import Places, run_beside, run_together
from tests.suite.waiting import cancelled


async def test_coroutines_end_with_the_block() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with run_beside(endless()):
        await asyncio.sleep(0)
        assert not ended.is_set()

    assert ended.is_set()


async def test_error_of_the_block_passes_as_it_is() -> None:
    error = ValueError("of the block")

    with pytest.raises(ValueError, match="of the block") as caught:
        async with run_beside(asyncio.Event().wait()):  # type: ignore[arg-type]
            raise error

    assert caught.value is error


async def test_error_of_a_coroutine_cancels_the_block_and_takes_its_place() -> None:
    async def crash() -> None:
        raise ValueError("of the coroutine")

    with pytest.raises(ValueError, match="of the coroutine"):
        async with run_beside(crash()):
            await asyncio.Event().wait()


async def test_error_of_a_task_that_a_coroutine_started_comes_out_as_it_is() -> None:
    async def crash() -> None:
        raise ValueError("of the task")

    async def start() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(crash())

    with pytest.raises(ValueError, match="of the task"):
        async with run_beside(start()):
            await asyncio.Event().wait()


async def test_results_come_in_the_order_of_their_coroutines() -> None:
    async def slow(first: asyncio.Event) -> int:
        await first.wait()
        return 1

    async def quick(first: asyncio.Event) -> int:
        first.set()
        return 2

    first = asyncio.Event()
    assert await run_together([slow(first), quick(first)]) == [1, 2]


async def test_the_first_error_ends_the_others_and_comes_out_as_it_is() -> None:
    has_ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async def crash() -> None:
        raise ValueError("of the coroutine")

    with pytest.raises(ValueError, match="of the coroutine"):
        await run_together([endless(), crash()])
    assert has_ended.is_set()


@pytest.mark.parametrize("comes_first", [False, True], ids=["before its turn", "as its turn comes"])
async def test_a_place_of_a_caller_that_leaves_goes_to_the_next(comes_first: bool) -> None:
    places = Places(1)
    await places.take()
    left, next_one = (asyncio.create_task(places.take()) for _ in range(2))
    await asyncio.sleep(0)  # both wait
    if comes_first:
        places.leave()
        left.cancel()
    else:
        await cancelled(left)
        places.leave()
    async with asyncio.timeout(1):
        await next_one
    assert left.cancelled()
