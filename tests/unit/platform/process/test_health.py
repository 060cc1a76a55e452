"""platform/process/health.py: what a process says of its health, from loading to draining."""

import asyncio

import pytest

from neuronpipe.platform.process.health import HealthBoard


@pytest.fixture
def board() -> HealthBoard:
    return HealthBoard(["own", "followed"])


def test_nothing_is_serving_before_the_process_is_open(board: HealthBoard) -> None:
    board.set("followed", True)
    assert [board.is_serving(name) for name in ("", "own", "followed")] == [False, False, False]


def test_an_open_process_is_serving_but_for_what_its_parts_report(board: HealthBoard) -> None:
    board.set("followed", False)
    board.open()
    assert [board.is_serving(name) for name in ("", "own", "followed")] == [True, True, False]


def test_a_report_while_draining_changes_nothing(board: HealthBoard) -> None:
    board.open()
    board.drain()
    board.set("followed", True)
    assert not board.is_serving("followed")


def test_an_unknown_service_has_no_health(board: HealthBoard) -> None:
    board.open()
    assert board.is_serving("nobody") is None


async def test_a_good_report_can_be_waited_for_before_the_process_is_open(board: HealthBoard) -> None:
    board.set("followed", False)
    waiting = asyncio.create_task(board.wait_until_reported("followed"))
    board.set("own", True)
    await asyncio.sleep(0)
    assert not waiting.done()
    board.set("followed", True)
    await asyncio.wait_for(waiting, 10)
    await asyncio.wait_for(board.wait_until_reported("own"), 10)


async def test_a_watch_tells_what_is_now_and_then_changes_only(board: HealthBoard) -> None:
    watch = board.watch("own")
    told = [await anext(watch)]
    board.set("followed", False)
    board.open()
    told.append(await anext(watch))
    board.drain()
    told.append(await anext(watch))
    assert told == [False, True, False]


async def test_a_watch_tells_of_draining_before_it_ends(board: HealthBoard) -> None:
    board.open()
    watch = board.watch("own")
    told = [await anext(watch)]
    board.drain()
    board.end_watches()
    assert [*told, *[is_serving async for is_serving in watch]] == [True, False]
