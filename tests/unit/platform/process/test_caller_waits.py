"""platform/process/caller_waits.py: what waits for callers, and for how long."""

import asyncio
from collections.abc import Callable

import pytest

from neuronpipe.core.metrics import Counter
from neuronpipe.platform.process import caller_waits
from neuronpipe.platform.process.caller_waits import CallerWaits


async def test_what_waits_for_too_long_is_ended_and_counted() -> None:
    ended, late = Counter(), asyncio.Event()
    waits = CallerWaits(0.01, 10, ended)
    waits.begin(lambda is_late: late.set() if is_late else None)
    await asyncio.wait_for(late.wait(), 10)
    assert ended.value == 1


async def test_what_is_done_in_time_is_left_alone() -> None:
    ended, second = Counter(), asyncio.Event()
    waits = CallerWaits(0.01, 10, ended)
    done = waits.begin(lambda is_late: pytest.fail("it was done"))
    waits.remove(done)
    waits.remove(done)
    waits.begin(lambda is_late: second.set())
    await asyncio.wait_for(second.wait(), 10)
    assert ended.value == 1


async def test_where_too_many_wait_the_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_waits, "_PATIENCE_S", 0.0)
    told: list[tuple[str, bool]] = []
    waits = CallerWaits(0, 2, Counter())

    def told_as(name: str) -> Callable[[bool], None]:
        return lambda is_late: told.append((name, is_late))

    for name in ("first", "second", "third"):
        waits.begin(told_as(name))
        await asyncio.sleep(0.001)  # so that one has waited longer
    assert told == [("first", False)]


async def test_a_moment_of_many_ends_nothing() -> None:
    waits = CallerWaits(0, 2, Counter())
    for _ in range(5):
        waits.begin(lambda is_late: pytest.fail("nobody has waited long"))
