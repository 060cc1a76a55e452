"""platform/process/in_flight.py: what is counted and refused, and what messages claim of the budget as they arrive."""

import asyncio
import contextlib
import itertools
import threading
import time
from typing import Any

import pytest

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.platform.process import in_flight as process_in_flight
from neuronpipe.platform.process.in_flight import InFlight

_LIMIT_S = 10
_MESSAGE_BYTES = 1000
_connections = itertools.count()


class _Caller:
    """A caller whose message comes when the test says so, and who is told when it is refused."""

    def __init__(self, in_flight: InFlight, connection: str = "") -> None:
        """`connection`: default one of its own."""
        self.is_read = False
        self.refusal: asyncio.Future[NeuronpipeError] = asyncio.get_running_loop().create_future()
        self._message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.received = asyncio.create_task(
            in_flight.receive(connection or str(next(_connections)), self._read, self._refuse)
        )

    async def _read(self) -> bytes:
        self.is_read = True
        return await self._message

    def _refuse(self, error: NeuronpipeError) -> None:
        self.refusal.set_result(error)
        self._message.set_result(b"")

    async def send(self) -> bytes:
        """Lets the message arrive."""
        self._message.set_result(b"message")
        return await asyncio.wait_for(self.received, _LIMIT_S)

    async def refused(self) -> NeuronpipeError:
        return await asyncio.wait_for(self.refusal, _LIMIT_S)


def _in_flight(**changes: Any) -> InFlight:
    given: dict[str, Any] = {"max_message_bytes": _MESSAGE_BYTES, "max_receiving_bytes": 2 * _MESSAGE_BYTES} | changes
    return InFlight("gateway", **given)


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that take long claim all that they ever will at once."""
    monkeypatch.setattr(process_in_flight, "_FULL_CLAIM_S", process_in_flight._QUICK_S / 10)


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


async def test_messages_that_come_at_once_claim_nothing() -> None:
    in_flight = _in_flight(max_receiving_bytes=1)
    callers = [_Caller(in_flight) for _ in range(50)]
    assert [await caller.send() for caller in callers] == [b"message"] * 50


@pytest.mark.usefixtures("impatient")
async def test_messages_that_take_long_are_refused_beyond_the_budget_and_told_to_come_back() -> None:
    in_flight = _in_flight()
    callers = [_Caller(in_flight) for _ in range(3)]
    error = await callers[2].refused()
    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_s > 0) == ("2000 bytes for messages while they arrive, the limit", True)
    assert [await caller.send() for caller in callers[:2]] == [b"message", b"message"]


@pytest.mark.usefixtures("impatient")
async def test_a_message_gives_its_part_of_the_budget_back_when_it_is_there() -> None:
    in_flight = _in_flight()
    for _ in range(3):
        callers = [_Caller(in_flight) for _ in range(2)]
        await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
        assert [await caller.send() for caller in callers] == [b"message", b"message"]


@pytest.mark.usefixtures("impatient")
async def test_a_message_whose_sender_leaves_gives_its_part_of_the_budget_back() -> None:
    in_flight = _in_flight(max_receiving_bytes=_MESSAGE_BYTES)
    leaving, refused = _Caller(in_flight), _Caller(in_flight)
    await refused.refused()
    leaving.received.cancel()
    await asyncio.wait([leaving.received])
    staying = _Caller(in_flight)
    await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
    assert await staying.send() == b"message"


@pytest.mark.usefixtures("impatient")
async def test_calls_of_one_connection_that_send_nothing_leave_half_of_the_budget_to_others() -> None:
    in_flight = _in_flight(max_receiving_bytes=4 * _MESSAGE_BYTES)
    silent = [_Caller(in_flight, "one") for _ in range(3)]
    error = await silent[2].refused()
    assert isinstance(error, Overloaded)
    assert error.message == "2000 bytes for messages of one connection while they arrive, the limit"
    others = [_Caller(in_flight, "another") for _ in range(2)]
    await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
    assert [await caller.send() for caller in (*silent[:2], *others)] == [b"message"] * 4
    again = _Caller(in_flight, "one")
    await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
    assert await again.send() == b"message"


@pytest.mark.usefixtures("impatient")
async def test_a_budget_smaller_than_a_message_still_takes_one() -> None:
    caller = _Caller(_in_flight(max_receiving_bytes=1))
    await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
    assert await caller.send() == b"message"


async def test_a_message_that_takes_a_little_longer_claims_little() -> None:
    # After a hundredth of the time for a full claim each of 50 claims about a hundredth of a message: half a message
    # together.
    callers = [_Caller(_in_flight(max_receiving_bytes=_MESSAGE_BYTES)) for _ in range(50)]
    await asyncio.sleep(2 * process_in_flight._QUICK_S)  # nothing is refused
    assert [await caller.send() for caller in callers] == [b"message"] * 50


async def test_a_small_message_that_arrives_slowly_has_room_beside_large_ones() -> None:
    in_flight = _in_flight(max_receiving_bytes=_MESSAGE_BYTES)
    large = _Caller(in_flight)
    await asyncio.sleep(2 * process_in_flight._FULL_CLAIM_S)
    others = [_Caller(in_flight) for _ in range(100)]
    await asyncio.gather(*(other.refused() for other in others[1:]))  # there is no room for all of them
    small = _Caller(in_flight)
    await asyncio.sleep(3 * process_in_flight._QUICK_S)  # nothing is refused
    assert [await caller.send() for caller in (large, small)] == [b"message"] * 2


async def test_few_messages_are_read_before_the_first_of_them_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_in_flight, "_QUICK_S", 3600)
    in_flight = _in_flight()
    callers = [_Caller(in_flight) for _ in range(process_in_flight._MAX_NEW_READS + 1)]
    await _settled()
    assert [caller.is_read for caller in callers] == [True] * process_in_flight._MAX_NEW_READS + [False]
    await callers[0].send()
    await _settled()
    assert callers[-1].is_read
    for caller in callers[1:]:
        await caller.send()


async def test_messages_that_take_long_do_not_hold_up_others() -> None:
    in_flight = _in_flight(max_receiving_bytes=1 << 30)
    slow = [_Caller(in_flight) for _ in range(process_in_flight._MAX_NEW_READS)]
    assert await _Caller(in_flight).send() == b"message"
    for caller in slow:
        await caller.send()


async def test_a_message_that_never_comes_does_not_hold_the_budget_for_ever() -> None:
    assert isinstance(await _Caller(_in_flight(max_receive_s=0.02)).refused(), DeadlineExceeded)


async def test_waiting_ends_with_the_last_call_and_at_the_limit() -> None:
    in_flight = _in_flight()
    with in_flight:
        await asyncio.wait_for(in_flight.wait_until_idle(0.01), _LIMIT_S)
        waiting = asyncio.create_task(in_flight.wait_until_idle(3600))
        await _settled()
        assert not waiting.done()
    await asyncio.wait_for(waiting, _LIMIT_S)


async def test_callers_that_go_on_calling_while_it_drains_are_told_until_they_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_reads_of_the_doors_own_calls_do_not_wait_for_those_of_work() -> None:
    in_flight = _in_flight()
    work = [_Caller(in_flight) for _ in range(20)]
    await _settled()
    assert [one.is_read for one in work].count(True) < 20

    async def read() -> bytes:
        return b"health"

    assert await in_flight.receive("another", read, lambda error: None, is_work=False) == b"health"
    for one in work:
        one.received.cancel()
    await asyncio.gather(*(one.received for one in work), return_exceptions=True)


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
    assert [type(one) for one in refusals] == [Overloaded]
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
    assert [type(one) for one in made] == [int, int, int, Overloaded, Overloaded]
    assert len(set(running[1:])) == 1
    assert await in_flight.make("a", 1 << 20, work) == 7
