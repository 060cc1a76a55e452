"""platform/process/life.py: the order of a process's life, with doors that speak no protocol."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from neuronpipe.core.errors import SetupError, Unavailable
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.process.settings import ProcessSettings
from tests.suite.waiting import happens

pytestmark = pytest.mark.usefixtures("own_signals")

_LIMIT_S = 10


class _Door:
    """A door that writes down what becomes of it."""

    port = 0

    def __init__(self, events: list[str], name: str = "door") -> None:
        self._events = events
        self._name = name

    @property
    def services(self) -> Collection[str]:
        return [f"{self._name}.Service"]

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        self.health, self.in_flight = health, in_flight
        self._events.append(f"{self._name} listens")

    def open(self) -> None:
        self._events.append(f"{self._name} opens")

    def ask_to_leave(self) -> None:
        self._events.append(f"{self._name} asks to leave")

    async def stop_listening(self, limit_s: float) -> None: ...

    def drain(self) -> None:
        self._events.append(f"{self._name} drains")

    async def stop(self, grace_s: float) -> None:
        self._events.append(f"{self._name} stops")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def door(events: list[str]) -> _Door:
    return _Door(events)


@pytest.fixture
async def life(door: _Door) -> Life:
    """A process that takes calls."""
    life = Life("gateway", _settings(), [door])
    await life.listen()
    life.open(door.open)
    return life


def _settings() -> ProcessSettings:
    return ProcessSettings(grace_s=_LIMIT_S)


async def test_a_metric_says_whether_the_process_is_well_also_before_it_opens(door: _Door) -> None:
    meters = Meters()
    life = Life("gateway", _settings(), [door], meters)

    def well() -> float:
        [family] = [family for family in meters.families() if family.instrument is Metrics.PROCESS_WELL]
        [series] = family.series.values()
        return family.number(series)

    assert well() == 1
    life.health.set("", False)
    assert well() == 0


async def test_parts_learn_of_draining_after_not_serving_is_said_and_before_calls_are_refused(
    life: Life, door: _Door, events: list[str]
) -> None:
    async def tell() -> None:
        with door.in_flight:  # not refused
            events.append(f"told, serving: {life.health.is_serving('')}")

    life.on_draining(tell)
    events.clear()
    await life.drain(_LIMIT_S)

    assert events == ["told, serving: False", "door asks to leave", "door drains", "door stops"]
    with pytest.raises(Unavailable, match="the gateway service is stopping"), door.in_flight:
        pass


async def test_callers_that_connect_again_while_calls_come_are_asked_to_leave_again(
    life: Life, door: _Door, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.platform.process.life._ASK_AGAIN_S", 0.2)
    draining = asyncio.create_task(life.drain(_LIMIT_S))
    while events.count("door asks to leave") < 3 and not draining.done():
        with door.in_flight:
            await asyncio.sleep(0.01)
    assert "door drains" not in events
    await asyncio.wait_for(draining, _LIMIT_S / 4)


async def test_new_calls_are_taken_until_every_part_is_done_with_the_news(life: Life, door: _Door) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def tell() -> None:
        began.set()
        await may_end.wait()

    life.on_draining(tell)
    draining = asyncio.create_task(life.drain(_LIMIT_S))
    await began.wait()
    with door.in_flight:
        may_end.set()
    await draining


async def test_a_part_that_never_ends_with_the_news_does_not_outlast_the_grace(life: Life, events: list[str]) -> None:
    life.on_draining(asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.wait_for(life.drain(0.01), _LIMIT_S)
    assert events[-1] == "door stops"


async def test_a_part_that_cannot_take_the_news_is_in_the_log_and_the_others_drain(
    life: Life, events: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise RuntimeError("the fault")

    async def tell() -> None:
        events.append("told")

    life.on_draining(fail)
    life.on_draining(tell)
    await life.drain(_LIMIT_S)
    assert "RuntimeError: the fault" in caplog.text
    assert events[-4:] == ["told", "door asks to leave", "door drains", "door stops"]


async def test_calls_that_come_while_callers_leave_are_answered(life: Life, events: list[str]) -> None:
    draining = asyncio.create_task(life.drain(_LIMIT_S))
    await happens(lambda: events[-1] == "door asks to leave")
    with life.in_flight:
        await happens(lambda: events[-1] == "door drains")
    await draining


async def test_doors_stop_after_what_is_in_flight_over_all_of_them(events: list[str]) -> None:
    doors = [_Door(events, "first"), _Door(events, "second")]
    life = Life("gateway", _settings(), doors)
    await life.listen()
    life.open(lambda: None)
    with doors[1].in_flight:
        draining = asyncio.create_task(life.drain(_LIMIT_S))
        await happens(lambda: events[-1] == "second drains")
    await draining
    assert events[-2:] == ["first stops", "second stops"]


async def test_every_doors_services_are_on_one_board(events: list[str]) -> None:
    life = Life("gateway", _settings(), [_Door(events, "first"), _Door(events, "second")])
    await life.listen()
    life.open(lambda: None)
    found = [life.health.is_serving(service) for service in ("first.Service", "second.Service", "third.Service")]
    assert found == [True, True, None]


async def test_a_process_takes_its_address_before_it_loads_and_unloads_after_it_has_stopped(
    door: _Door, events: list[str]
) -> None:
    loaded = asyncio.Event()

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        events.append("loads")
        asyncio.get_running_loop().call_soon(loaded.set)
        yield door.open
        events.append("unloads")

    serving = asyncio.create_task(serve("gateway", _settings(), [door], assemble))
    await loaded.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, _LIMIT_S)

    assert events[:3] == ["door listens", "loads", "door opens"]
    assert events[3:] == ["door asks to leave", "door drains", "door stops", "unloads", "door stops"]


async def test_a_crash_of_what_was_assembled_drains_first_and_ends_the_process_with_its_error(
    door: _Door, events: list[str]
) -> None:
    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        async def crash() -> None:
            raise RuntimeError("the fault")

        async with asyncio.TaskGroup() as group:
            group.create_task(crash())
            yield door.open

    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(serve("gateway", _settings(), [door], assemble), _LIMIT_S)
    assert events == ["door listens", "door opens", "door drains", "door stops", "door stops"]


async def test_a_door_without_an_address_ends_the_others(door: _Door, events: list[str]) -> None:
    class Broken(_Door):
        async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
            raise SetupError("cannot listen")

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        events.append("loads")
        yield lambda: None

    with pytest.raises(SetupError, match="cannot listen"):
        await serve("gateway", _settings(), [door, Broken(events, "broken")], assemble)
    assert events == ["door listens", "door stops", "broken stops"]


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_start_that_fails_while_it_is_ended_has_ended(events: list[str], signals: int) -> None:
    class Broken(_Door):
        async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
            raise SetupError("cannot listen")

        async def stop(self, grace_s: float) -> None:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        yield lambda: None

    await asyncio.wait_for(serve("gateway", _settings(), [Broken(events)], assemble), _LIMIT_S)
    task = asyncio.current_task()
    assert task
    assert not task.cancelling()


async def test_a_message_that_never_comes_holds_up_the_end_for_half_of_the_grace(life: Life, door: _Door) -> None:
    refusals: list[Exception] = []
    refused = asyncio.Event()

    def refuse(error: Exception) -> None:
        refusals.append(error)
        refused.set()

    async def receive() -> None:
        with door.in_flight, door.in_flight.arriving("a caller", refuse):
            await refused.wait()

    receiving = asyncio.create_task(receive())
    await happens(lambda: door.in_flight.count == 1)
    draining = asyncio.create_task(life.drain(1.0))
    await asyncio.sleep(0.3)
    assert not refusals
    await asyncio.wait_for(draining, _LIMIT_S)
    await receiving
    assert [str(error) for error in refusals] == ["the gateway service is stopping"]
