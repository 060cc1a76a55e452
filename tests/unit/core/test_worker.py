"""core/worker.py: large work leaves the event loop free."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from neuronpipe.core.worker import Worker

_SMALL_BYTES = 100
_LARGE_BYTES = 1 << 20


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("test")
    yield worker
    worker.close()


async def test_small_work_is_done_at_once(worker: Worker) -> None:
    assert await worker.run(_SMALL_BYTES, threading.get_ident) == threading.get_ident()


async def test_large_work_leaves_the_event_loop_free(worker: Worker) -> None:
    released = threading.Event()
    work = asyncio.create_task(worker.run(_LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)  # with the work on the loop, the test would not come back from here
    released.set()
    assert await work is True


async def test_large_work_is_done_in_the_order_in_which_it_comes(worker: Worker) -> None:
    done: list[int] = []
    await asyncio.gather(*(worker.run(_LARGE_BYTES, done.append, number) for number in range(20)))
    assert done == list(range(20))


@pytest.mark.parametrize("size_bytes", [_SMALL_BYTES, _LARGE_BYTES])
async def test_what_work_raises_reaches_whoever_asked(worker: Worker, size_bytes: int) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run(size_bytes, lambda: 1 // 0)


async def test_closing_waits_for_the_work_being_done() -> None:
    worker, began, done = Worker("test"), threading.Event(), []

    def work() -> None:
        began.set()
        done.append("done")

    task = asyncio.create_task(worker.run(_LARGE_BYTES, work))
    await asyncio.to_thread(began.wait, 10)
    worker.close()
    assert done == ["done"]
    await task


async def test_small_work_waits_behind_large_work_instead_of_holding_up_the_event_loop(worker: Worker) -> None:
    released = threading.Event()
    large = asyncio.create_task(worker.run(_LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)
    small = asyncio.create_task(worker.run(_SMALL_BYTES, threading.get_ident))
    await asyncio.sleep(0)
    assert not small.done()
    released.set()
    assert await large is True
    assert await small != threading.get_ident()


async def test_small_work_waits_behind_large_work_whose_caller_left(worker: Worker) -> None:
    began, released = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        released.wait(10)

    large = asyncio.create_task(worker.run(_LARGE_BYTES, work))
    await asyncio.to_thread(began.wait, 10)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    small = asyncio.create_task(worker.run(_SMALL_BYTES, threading.get_ident))
    await asyncio.sleep(0)
    assert not small.done()
    released.set()
    assert await small != threading.get_ident()


async def test_a_pass_of_the_event_loop_does_a_limited_amount_of_small_work(worker: Worker) -> None:
    # 100 pieces of 100 bytes, of which 4,096 bytes are done in a pass.
    done: list[int] = []
    work = asyncio.gather(*(worker.run(_SMALL_BYTES, done.append, number) for number in range(100)))
    passes = []
    while not work.done():
        await asyncio.sleep(0)
        passes.append(len(done))
    assert sorted(set(passes)) == [40, 80, 100]
    assert done == list(range(100))


async def test_small_work_is_done_on_the_loop_however_much_there_is(worker: Worker) -> None:
    places = await asyncio.gather(*(worker.run(_SMALL_BYTES, threading.get_ident) for _ in range(1000)))
    assert set(places) == {threading.get_ident()}


async def test_small_work_whose_caller_left_takes_no_turn(worker: Worker) -> None:
    done: list[int] = []
    tasks = [asyncio.create_task(worker.run(_SMALL_BYTES, done.append, number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[40:60]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [*range(40), *range(60, 100)]


async def test_small_work_whose_turn_comes_behind_large_work_waits_for_it(worker: Worker) -> None:
    released = threading.Event()
    small = [asyncio.create_task(worker.run(_SMALL_BYTES, threading.get_ident)) for _ in range(50)]
    await asyncio.sleep(0)
    large = asyncio.create_task(worker.run(_LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0.01)
    assert [task.done() for task in small] == [True] * 40 + [False] * 10
    released.set()
    assert await large is True
    assert threading.get_ident() not in await asyncio.gather(*small[40:])


async def test_small_work_of_the_next_pass_is_done_at_once_again(worker: Worker) -> None:
    for _ in range(100):
        assert await worker.run(_SMALL_BYTES, threading.get_ident) == threading.get_ident()
        await asyncio.sleep(0)
