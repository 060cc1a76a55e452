"""platform/process/in_flight.py: what is counted and refused, and what messages claim of the budget as they arrive."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.platform.process import in_flight as process_in_flight
from neuronpipe.platform.process.in_flight import InFlight

_LIMIT_S = 10
_MESSAGE_BYTES = 1000


def _in_flight(**changes: Any) -> InFlight:
    given: dict[str, Any] = {"max_message_bytes": _MESSAGE_BYTES, "max_receiving_bytes": 2 * _MESSAGE_BYTES} | changes
    return InFlight("gateway", **given)


async def test_a_call_is_counted_until_it_ends() -> None:
    in_flight = _in_flight()
    with in_flight, in_flight:
        assert in_flight.count == 2
    assert in_flight.count == 0


async def test_a_call_beyond_the_limit_is_told_to_come_back() -> None:
    in_flight = _in_flight(max_calls=1)
    with in_flight, pytest.raises(Overloaded, match="the gateway service takes 1") as caught, in_flight:
        pass
    assert caught.value.retry_after_s > 0


async def test_a_call_while_draining_is_unavailable() -> None:
    in_flight = _in_flight()
    in_flight.drain()
    with pytest.raises(Unavailable, match="the gateway service is stopping"), in_flight:
        pass


async def test_a_message_that_never_comes_does_not_hold_the_budget_for_ever() -> None:
    refusal: asyncio.Future[NeuronpipeError] = asyncio.get_running_loop().create_future()
    with _in_flight(max_receive_s=0.02).arriving("a", refusal.set_result):
        assert isinstance(await asyncio.wait_for(refusal, _LIMIT_S), DeadlineExceeded)


async def test_waiting_ends_with_the_last_call_and_at_the_limit() -> None:
    in_flight = _in_flight()
    with in_flight:
        await asyncio.wait_for(in_flight.wait_until_idle(0.01), _LIMIT_S)
        waiting = asyncio.create_task(in_flight.wait_until_idle(3600))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, _LIMIT_S)


async def test_callers_that_call_while_it_drains_are_told_until_they_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_in_flight, "_QUIET_S", 0.05)
    in_flight = _in_flight()
    in_flight.drain()
    waiting = asyncio.create_task(in_flight.wait_until_quiet(_LIMIT_S))
    for _ in range(20):
        with pytest.raises(Unavailable, match="stopping"), in_flight:
            pass
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await asyncio.wait_for(waiting, _LIMIT_S)


async def test_callers_that_never_stop_calling_do_not_keep_it() -> None:
    in_flight = _in_flight()
    in_flight.drain()

    async def call_for_ever() -> None:
        while True:
            with contextlib.suppress(Unavailable), in_flight:
                pass
            await asyncio.sleep(0)

    caller = asyncio.create_task(call_for_ever())
    await asyncio.wait_for(in_flight.wait_until_quiet(0.05), _LIMIT_S)
    caller.cancel()


async def test_a_process_is_unused_when_no_call_has_been_in_flight_for_so_long() -> None:
    in_flight = _in_flight()
    waiting = asyncio.create_task(in_flight.wait_until_unused(0.3))
    with in_flight:
        await asyncio.sleep(0.5)
        assert not waiting.done()
    await asyncio.sleep(0.1)
    with in_flight:  # a call in between begins it anew
        pass
    ended_s = asyncio.get_running_loop().time()
    await asyncio.wait_for(waiting, _LIMIT_S)
    assert asyncio.get_running_loop().time() - ended_s > 0.25


async def test_a_message_that_arrives_in_pieces_claims_what_has_come() -> None:
    in_flight = _in_flight()
    refusals: list[NeuronpipeError] = []
    with in_flight.arriving("a", refusals.append) as has_come:
        has_come(_MESSAGE_BYTES)
        with in_flight.arriving("b", refusals.append) as another_has_come:
            another_has_come(_MESSAGE_BYTES)
            assert not refusals
            with in_flight.arriving("c", refusals.append) as third_has_come:
                third_has_come(_MESSAGE_BYTES // 2)
    assert [type(refusal) for refusal in refusals] == [Overloaded]
    with in_flight.arriving("a", refusals.append) as has_come:
        has_come(_MESSAGE_BYTES)
    assert len(refusals) == 1


async def test_large_messages_are_made_in_turn_and_within_the_budget() -> None:
    in_flight = InFlight("gateway", 1 << 20, 3 << 20)
    running: list[int] = []

    def work() -> int:
        running.append(threading.get_ident())
        time.sleep(0.01)
        return 7

    assert await in_flight.make("a", 100, work) == 7
    assert running == [threading.get_ident()]
    made = await asyncio.gather(*(in_flight.make(str(n), 1 << 20, work) for n in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in made] == [int, int, int, Overloaded, Overloaded]
    assert len(set(running[1:])) == 1
    assert await in_flight.make("a", 1 << 20, work) == 7
