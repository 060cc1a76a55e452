"""platform/process/lanes.py: large work leaves the event loop free, and the work of other lanes alone."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from neuronpipe.core.errors import Overloaded
from neuronpipe.platform.process import lanes as lanes_module
from neuronpipe.platform.process.lanes import Lane, Lanes, is_on_event_loop
from tests.suite.waiting import cancelled

_SMALL_BYTES = 100
_LARGE_BYTES = 1 << 20


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes("test", threads=2)
    yield lanes
    lanes.close()


@pytest.fixture
async def lane(lanes: Lanes) -> AsyncIterator[Lane]:
    lane = lanes.lane("a model")
    yield lane
    await lane.close()


@pytest.fixture
async def other(lanes: Lanes) -> AsyncIterator[Lane]:
    lane = lanes.lane("another model")
    yield lane
    await lane.close()


async def _blocked(lane: Lane, released: threading.Event) -> "asyncio.Task[bool]":
    """The work that keeps a lane busy, once it has begun."""
    began = threading.Event()

    def work() -> bool:
        began.set()
        return released.wait(10)

    working = asyncio.create_task(lane.run("", _LARGE_BYTES, work))
    await asyncio.to_thread(began.wait, 10)
    return working


async def test_small_work_is_done_at_once(lane: Lane) -> None:
    assert await lane.run("", _SMALL_BYTES, threading.get_ident) == threading.get_ident()


async def test_work_that_would_wait_is_not_done_at_once(lane: Lane, other: Lane) -> None:
    assert lane.run_at_once(_SMALL_BYTES, threading.get_ident) == threading.get_ident()
    assert lane.run_at_once(_LARGE_BYTES, threading.get_ident) is None
    assert other.run_at_once(lanes_module._INLINE_BYTES - _SMALL_BYTES, int) == 0
    assert lane.run_at_once(_SMALL_BYTES, int) is None  # this pass of the event loop has no room
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert lane.run_at_once(_SMALL_BYTES, int) == 0
    released = threading.Event()
    large = await _blocked(lane, released)
    assert lane.run_at_once(_SMALL_BYTES, int) is None
    released.set()
    await large


async def test_a_panic_of_work_that_is_done_at_once_is_an_exception_too(lane: Lane) -> None:
    def panic() -> None:
        raise _Panic

    with pytest.raises(RuntimeError, match="a library panicked"):
        lane.run_at_once(_SMALL_BYTES, panic)


class _Panic(BaseException):
    """As pyo3_runtime.PanicException, which a library in Rust raises."""


@pytest.mark.parametrize("size_bytes", [_SMALL_BYTES, _LARGE_BYTES])
async def test_a_panic_is_an_exception_that_doors_answer(lane: Lane, size_bytes: int) -> None:
    def panic() -> None:
        raise _Panic

    with pytest.raises(RuntimeError, match="a library panicked"):
        await lane.run("", size_bytes, panic)
    assert await lane.run("", size_bytes, lambda: 1) == 1


async def test_work_can_tell_whether_it_is_done_on_the_loop(lane: Lane) -> None:
    assert await lane.run("", _SMALL_BYTES, is_on_event_loop)
    assert not await lane.run("", _LARGE_BYTES, is_on_event_loop)


async def test_large_work_leaves_the_event_loop_free(lane: Lane) -> None:
    released = threading.Event()
    work = asyncio.create_task(lane.run("", _LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)  # with the work on the loop, the test would not come back from here
    released.set()
    assert await work is True


async def test_large_work_is_done_in_the_order_in_which_it_comes(lane: Lane) -> None:
    done: list[int] = []
    await asyncio.gather(*(lane.run("", _LARGE_BYTES, done.append, number) for number in range(20)))
    assert done == list(range(20))


@pytest.mark.parametrize("size_bytes", [_SMALL_BYTES, _LARGE_BYTES])
async def test_what_work_raises_reaches_whoever_asked(lane: Lane, size_bytes: int) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.run("", size_bytes, lambda: 1 // 0)


async def test_closing_waits_for_the_work_being_done_and_cancels_what_waits(lanes: Lanes) -> None:
    lane, released, done = lanes.lane("a model"), threading.Event(), list[str]()
    begun = await _blocked(lane, released)
    waiting = asyncio.create_task(lane.run("", _LARGE_BYTES, done.append, "waiting"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    released.set()
    await closing
    assert (done, await begun) == ([], True)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_small_work_waits_behind_large_work_instead_of_holding_up_the_event_loop(lane: Lane) -> None:
    released = threading.Event()
    large = asyncio.create_task(lane.run("", _LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)
    small = asyncio.create_task(lane.run("", _SMALL_BYTES, threading.get_ident))
    await asyncio.sleep(0)
    assert not small.done()
    released.set()
    assert await large is True
    assert await small != threading.get_ident()


async def test_small_work_waits_behind_large_work_whose_caller_left(lane: Lane) -> None:
    released = threading.Event()
    large = await _blocked(lane, released)
    await cancelled(large)
    small = asyncio.create_task(lane.run("", _SMALL_BYTES, threading.get_ident))
    await asyncio.sleep(0)
    assert not small.done()
    released.set()
    assert await small != threading.get_ident()


@pytest.mark.parametrize("models", [1, 2])
async def test_a_pass_of_the_event_loop_does_a_limited_amount_of_small_work_of_all_models(
    lane: Lane, other: Lane, models: int
) -> None:
    # 100 pieces of 100 bytes, of which 4,096 bytes are done in a pass.
    done: list[int] = []
    of = [(lane, other)[number % models] for number in range(100)]
    work = asyncio.gather(*(used.run("", _SMALL_BYTES, done.append, number) for number, used in enumerate(of)))
    passes = []
    while not work.done():
        await asyncio.sleep(0)
        passes.append(len(done))
    assert sorted(set(passes)) == [40, 80, 100]
    assert done == list(range(100))


async def test_small_work_is_done_on_the_loop_however_much_there_is(lane: Lane) -> None:
    places = await asyncio.gather(*(lane.run("", _SMALL_BYTES, threading.get_ident) for _ in range(1000)))
    assert set(places) == {threading.get_ident()}


async def test_small_work_whose_caller_left_takes_no_turn(lane: Lane) -> None:
    done: list[int] = []
    tasks = [asyncio.create_task(lane.run("", _SMALL_BYTES, done.append, number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[40:60]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [*range(40), *range(60, 100)]


async def test_small_work_whose_turn_comes_behind_large_work_waits_for_it(lane: Lane) -> None:
    released = threading.Event()
    small = [asyncio.create_task(lane.run("", _SMALL_BYTES, threading.get_ident)) for _ in range(50)]
    await asyncio.sleep(0)
    large = asyncio.create_task(lane.run("", _LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0.01)
    assert [task.done() for task in small] == [True] * 40 + [False] * 10
    released.set()
    assert await large is True
    assert threading.get_ident() not in await asyncio.gather(*small[40:])


async def test_small_work_of_the_next_pass_is_done_at_once_again(lane: Lane) -> None:
    for _ in range(100):
        assert await lane.run("", _SMALL_BYTES, threading.get_ident) == threading.get_ident()
        await asyncio.sleep(0)


async def test_long_work_of_one_model_does_not_delay_small_work_of_another(lane: Lane, other: Lane) -> None:
    released = threading.Event()
    long = asyncio.create_task(lane.run("", _LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(other.run("", _SMALL_BYTES, threading.get_ident), 5) == threading.get_ident()
    assert not long.done()
    released.set()
    await long


async def test_queued_long_work_of_one_model_leaves_a_thread_to_another(lane: Lane, other: Lane) -> None:
    released = threading.Event()
    queued = [asyncio.create_task(lane.run("", _LARGE_BYTES, released.wait, 10)) for _ in range(10)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(other.run("", _LARGE_BYTES, lambda: "done"), 5) == "done"
    assert not any(task.done() for task in queued)
    released.set()
    await asyncio.gather(*queued)


async def test_groups_of_a_lane_take_turns_in_a_thread(lane: Lane) -> None:
    released, done = threading.Event(), list[str]()
    first = await _blocked(lane, released)
    groups = ["many"] * 4 + ["few"] * 2
    work = asyncio.gather(*(lane.run(group, _LARGE_BYTES, done.append, group) for group in groups))
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(first, work)
    assert done == ["many", "few", "many", "few", "many", "many"]


async def test_groups_take_turns_on_the_event_loop(lane: Lane, other: Lane) -> None:
    done = list[str]()
    large = lanes_module._INLINE_BYTES
    work = [lane.run("many", large, done.append, "many") for _ in range(4)]
    await asyncio.gather(*work, other.run("few", large, done.append, "few"))
    assert done == ["many", "many", "few", "many", "many"]


async def test_lanes_take_turns_where_there_are_more_of_them_than_threads() -> None:
    lanes, released = Lanes("test", threads=1), threading.Event()
    first, second = lanes.lane("first"), lanes.lane("second")
    done: list[str] = []
    blocking = asyncio.create_task(first.run("", _LARGE_BYTES, released.wait, 10))
    await asyncio.sleep(0)
    named = [("first", first)] * 4 + [("second", second)] * 4
    work = asyncio.gather(*(lane.run("", _LARGE_BYTES, done.append, name) for name, lane in named))
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(blocking, work)
    lanes.close()
    assert done == ["second", "first"] * 4


async def test_a_lane_does_one_piece_at_a_time(lane: Lane) -> None:
    at_work: set[int] = set()
    most: list[int] = []

    def work(number: int) -> None:
        at_work.add(number)
        time.sleep(0.001)  # so that a second one would be seen
        most.append(len(at_work))
        at_work.remove(number)

    await asyncio.gather(*(lane.run("", _LARGE_BYTES, work, number) for number in range(20)))
    assert set(most) == {1}


async def test_long_work_whose_caller_left_is_not_begun_and_its_input_is_let_go(lane: Lane) -> None:
    class Image:
        pass

    released, done = threading.Event(), list[object]()
    blocking = await _blocked(lane, released)
    image = Image()
    left = asyncio.create_task(lane.run("", _LARGE_BYTES, done.append, image))
    await asyncio.sleep(0)
    await cancelled(left)
    await asyncio.sleep(0)
    seen = weakref.ref(image)
    del image, left
    gc.collect()
    assert seen() is None
    last = asyncio.create_task(lane.run("", _LARGE_BYTES, done.append, "last"))
    released.set()
    await asyncio.gather(blocking, last)
    assert done == ["last"]


async def test_a_lane_holds_a_limited_number_of_pieces(lane: Lane) -> None:
    released = threading.Event()
    blocking = await _blocked(lane, released)
    waiting = [asyncio.create_task(lane.run("", _LARGE_BYTES, int)) for _ in range(4096)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4096 inputs wait for a model, which is the limit"):
        await lane.run("", _LARGE_BYTES, int)
    released.set()
    await asyncio.gather(blocking, *waiting)
