"""rpc/http2: a connection that many callers share, as behind a proxy: a stream fails alone, only floods end all."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat

import pytest
from ngh2 import DenialOfServiceError
from ngh2.events import GoAwayReceived, StreamReset

from neuronpipe.core.names import Metrics
from neuronpipe.platform.process import caller_waits
from neuronpipe.platform.process import in_flight as in_flight_module
from neuronpipe.platform.process.receiving_budget import Claim
from neuronpipe.rpc.http2 import closing as closing_module
from neuronpipe.rpc.http2 import frame_budget
from neuronpipe.rpc.http2.client import ClientCall, Http2Channel
from neuronpipe.rpc.http2.connection import Keepalive
from neuronpipe.rpc.http2.frame_budget import Rate
from neuronpipe.rpc.http2.server import _ServerConnection
from neuronpipe.rpc.transport import ServerCall
from tests.interop import frames
from tests.suite.waiting import happens
from tests.unit.rpc.http2.serving import Caller, Held, System, connected, echo_all, serving

_LIMIT_S = 10
_ENHANCE_YOUR_CALM = 11
_MIB = 1 << 20
_HEAD = frames.block(frames.call_fields("/a/Echo"))
_UNKNOWN_HEAD = frames.block(frames.call_fields("/a/Unknown"))
_PING = frames.frame(frames.PING, payload=b"12345678")
_PRIORITY_PAYLOAD = b"\0\0\0\1\0"


def _connection(system: System) -> _ServerConnection:
    [connection] = system.server.connections
    return connection


def _calls_ended(system: System) -> float:
    """How many calls were ended because their answers were not read."""
    return system.server.options.in_flight.meters.counter(Metrics.CALLS_ENDED, "max_send_s").value


def _goaways(caller: Caller) -> list[int]:
    return [event.error_code for event in caller.events if isinstance(event, GoAwayReceived)]


def _resets(caller: Caller, number: int) -> list[int]:
    return [event.error_code for event in caller.of(number, StreamReset)]


def _open(number: int, head: bytes = _HEAD) -> bytes:
    return frames.frame(frames.HEADERS, frames.END_HEADERS, number, head)


# --- silence ---


def _checks(keepalive: Keepalive, *times: tuple[float, float]) -> list[float]:
    """Returns the time until the next check, after checks at these times; each with the time of the last bytes."""
    return [keepalive.check(now_s, received_s, lambda ping: None) - now_s for now_s, received_s in times]


def test_a_peer_that_answers_no_ping_in_time_is_given_up() -> None:
    looks = [(30 + look / 2, 10.0) for look in range(11)]
    assert _checks(Keepalive(20, 5), (10, 10), *looks) == [20, *[0.5] * 10, 0]


def test_a_standstill_between_ping_and_answer_is_no_time_of_the_peer() -> None:
    keepalive = Keepalive(20, 5)
    _checks(keepalive, *[(30 + look / 2, 10.0) for look in range(9)])
    assert _checks(keepalive, (1000, 10), (1001, 1000.5)) == [0.5, 19.5]


def test_a_silent_peer_is_pinged_once() -> None:
    pings: list[bytes] = []
    keepalive = Keepalive(20, 5)
    for now_s, received_s in (10, 10), (30, 10), (31, 10), (900, 10), (901, 900), (920, 900):
        keepalive.check(now_s, received_s, pings.append)
    assert pings == [b"alive\0\0\0"] * 2


# --- resets and frames that bring nothing ---


async def test_all_calls_of_a_connection_may_be_cancelled_together_and_the_others_are_answered() -> None:
    held = Held()
    async with connected(held) as (system, caller):
        others = [caller.call(b"a") for _ in range(20)]
        some = [caller.call(b"a") for _ in range(2000)]
        await happens(lambda: system.method.accepted == 2020)
        for number in some:
            caller.engine.reset_stream(number)
        caller.flush()
        await happens(lambda: system.method.ended == 2000)
        held.may_answer.set()
        assert {await caller.code(number) for number in others} == {"OK"}
        assert _goaways(caller) == []


async def test_calls_that_reach_their_deadlines_at_both_sides_leave_the_connection_to_the_others() -> None:
    held = Held()
    async with connected(held) as (system, caller):
        next_call = caller.call(b"a")
        some = [caller.call(b"a", "/a/Echo", (b"grpc-timeout", b"50m")) for _ in range(1500)]
        await happens(lambda: system.method.ended == len(some))
        # A client whose own clock ends the call a moment later.
        caller.writer.write(b"".join(map(frames.reset, some)))
        await asyncio.sleep(0.1)  # to prove that nothing happens
        held.may_answer.set()
        assert await caller.code(next_call) == "OK"


async def test_a_rate_is_exceeded_by_a_flood_and_not_by_as_many_frames_in_time() -> None:
    rate = Rate(3, 10)
    for now_s in (0.0, 0.0, 0.0, 0.1, 0.2, 10.0, 10.0, 10.0):
        rate.count(now_s)
    with pytest.raises(DenialOfServiceError, match="3 frames, then 10 a second"):
        rate.count(10.09)


async def test_pings_of_a_quiet_connection_never_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_budget, "_IDLE_FRAMES", (5, 1000))
    async with connected() as (_, caller):
        for _ in range(50):
            caller.engine.ping(b"12345678")
            caller.flush()
            await asyncio.sleep(0.01)  # as long as ten of them may take
        assert await caller.code(caller.call(b"a")) == "OK"


async def test_a_ping_beside_each_message_is_no_flood() -> None:
    async with connected(echo_all, takes_stream=True) as (_, caller):
        number = caller.open()
        for count in range(1, 2001):
            caller.send(number, frames.message(b"a"))
            caller.engine.ping(b"12345678")
            if not count % 100:
                await happens(lambda count=count: len(caller.received(number)) == 6 * count)  # type: ignore[misc]
        caller.send(number, b"", ends=True)
        assert await caller.code(number) == "OK"


async def test_a_reader_may_give_windows_for_each_piece_that_it_has_read() -> None:
    answer = b"x" * (4 * _MIB)

    async def send(call: ServerCall, request: bytes | None) -> None:
        await call.send(answer)

    async with connected(send) as (_, caller):
        number = caller.call(b"a")
        assert await caller.code(number) == "OK"
        # What golang.org/x/net/http2 sends: one of the stream, and one of the connection, for each 4 KiB.
        pieces = len(answer) // 4096
        caller.writer.write((frames.window_update(0, 4096) + frames.window_update(number, 4096)) * pieces)
        assert await caller.code(caller.call(b"a")) == "OK"


def _endless_head(part: bytes) -> Iterator[bytes]:
    yield frames.frame(frames.HEADERS, 0, 1, _HEAD)
    yield from repeat(frames.frame(frames.CONTINUATION, 0, 1, part), 20_000)


def _rapid_resets(head: bytes, *, has_message: bool = False) -> Iterator[bytes]:
    for number in range(1, 20_000, 2):
        message = frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(b"a")) if has_message else b""
        yield _open(number, head) + message + frames.reset(number)


@pytest.mark.parametrize(
    "flood",
    [
        lambda: repeat(_PING, 20_000),
        lambda: repeat(frames.frame(frames.PING, frames.ACK, payload=b"12345678"), 20_000),
        lambda: repeat(frames.settings([(1, 4096)]), 20_000),
        lambda: repeat(frames.window_update(0, 1), 20_000),
        lambda: [_open(1), *repeat(frames.window_update(1, 1), 20_000)],
        lambda: [_open(1), *repeat(frames.frame(frames.DATA, 0, 1), 20_000)],
        lambda: repeat(frames.frame(frames.PRIORITY, 0, 3, _PRIORITY_PAYLOAD), 20_000),
        lambda: repeat(frames.frame(200, 0, 0, b"a"), 20_000),
        lambda: [_open(1), *repeat(frames.frame(frames.GOAWAY, payload=b"\0\0\0\0\0\0\0\0"), 20_000)],
        lambda: [_open(1), *repeat(frames.reset(1), 20_000)],
        lambda: _endless_head(b""),
        lambda: _endless_head(frames.block([(b"x-field", b"a" * 16_000)])),
        lambda: _rapid_resets(_HEAD),
        lambda: _rapid_resets(_HEAD, has_message=True),
        lambda: _rapid_resets(_UNKNOWN_HEAD),
    ],
    ids=[
        "PING",
        "PING acknowledgements",
        "SETTINGS",
        "WINDOW_UPDATE",
        "WINDOW_UPDATE of a stream",
        "empty DATA",
        "PRIORITY",
        "frames of no kind",
        "GOAWAY",
        "resets of a call that is over",
        "empty CONTINUATION",
        "CONTINUATION",
        "rapid reset",
        "rapid reset with a message",
        "rapid reset of calls that are refused",
    ],
)
async def test_floods_end_the_connection(flood: Callable[[], Iterable[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_module, "_LINGER_S", 0.05)
    async with serving(Held()) as system:
        reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
        writer.write(frames.PREFACE + frames.settings() + frames.frame(frames.SETTINGS, frames.ACK))
        writer.write(b"".join(flood()))
        received = await asyncio.wait_for(reader.read(), _LIMIT_S)
        assert [kind for kind, *_ in frames.frames_in(received)[0]][-1] == frames.GOAWAY
        await happens(lambda: not system.server.connections)
        assert system.ended("protocol") == 1
        writer.close()


# --- what is not read ---


async def test_streams_that_are_not_read_hold_up_no_other_call() -> None:
    held = Held()

    async def answer(call: ServerCall, request: bytes | None) -> None:
        first = await call.read()
        if first and len(first) > 1:  # the others' messages wait
            await held.may_answer.wait()
            while await call.read() is not None:
                pass
        await call.send(b"")

    async with connected(answer, takes_stream=True) as (system, caller):
        unread = []
        for _ in range(100):
            unread.append(caller.open())
            caller.send(unread[-1], frames.message(b"x" * 60_000) * 25, ends=True)
        await happens(lambda: sum(bool(call._held_bytes) for call in _connection(system).streams.values()) == 100)
        next_call = caller.call(b"a")
        assert await caller.code(next_call) == "OK"
        large = caller.call(b"a")
        assert await caller.code(large) == "OK"
        held.may_answer.set()
        assert {await caller.code(number) for number in unread} == {"OK"}


async def test_streams_that_are_not_read_take_no_more_memory_than_a_connection_may() -> None:
    held = Held()

    async def answer(call: ServerCall, request: bytes | None) -> None:
        await held.may_answer.wait()
        await call.send(await call.read() or b"")

    async with serving(answer, takes_stream=True, max_message_bytes=_MIB, max_receiving_bytes=16 * _MIB) as system:
        caller = await system.connect()
        numbers = [caller.open() for _ in range(50)]
        for number in numbers:
            caller.send(number, frames.message(b"x" * 60_000) * 25)
        # Of 50 streams with more than 1 MiB each, fewer than half find room in the connection's 8 MiB.
        await happens(lambda: sum(bool(call.error) for call in _connection(system).streams.values()) > 25)
        kept_bytes = sum(call.unread_bytes + call.buffered_bytes for call in _connection(system).streams.values())
        assert kept_bytes <= 8 * _MIB
        next_call = caller.open()
        caller.send(next_call, frames.message(b"a"), ends=True)
        held.may_answer.set()
        assert await caller.code(next_call) == "OK"


@asynccontextmanager
async def _channel(system: System) -> AsyncIterator[Http2Channel]:
    channel = Http2Channel(f"ipv4:127.0.0.1:{system.port}")
    try:
        yield channel
    finally:
        await channel.close()


async def test_answers_that_a_client_does_not_read_hold_up_none_of_its_other_calls() -> None:
    async def answer(call: ServerCall, request: bytes | None) -> None:
        message = await call.read() or b""
        for _ in range(int(message)):
            await call.send(b"x" * 60_000)

    async with serving(answer, takes_stream=True) as system:
        async with _channel(system) as channel:
            unread: list[ClientCall] = []
            for _ in range(24):
                unread.append(await channel.open_call("/a/Echo"))
                await asyncio.sleep(0)  # in which its head goes
                await unread[-1].write(b"25")
            await happens(lambda: all(call._held_bytes for call in unread))
            next_call = await channel.open_call("/a/Echo")
            await asyncio.sleep(0)
            await next_call.write(b"1")
            async with asyncio.timeout(_LIMIT_S):
                assert await next_call.read() == b"x" * 60_000
        await happens(lambda: system.method.ended == 25)


class _SlowReader:
    """A connection on which the answers of some calls are not read. The window of each of their streams is empty."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        caller.engine.update_settings({4: 0})
        caller.flush()

    async def call(self, message: bytes) -> int:
        return self.caller.call(message)

    async def other_is_answered(self) -> None:
        """Raises AssertionError where a call of the same connection, whose answer is read, has no answer."""
        number = self.caller.open()
        self.caller.engine.set_local_window_size(_MIB, stream_id=number)
        self.caller.send(number, frames.message(b"other"), ends=True)
        assert await self.caller.code(number) == "OK"
        assert self.caller.received(number) == frames.message(b"other")


async def test_a_caller_that_does_not_read_loses_its_call_and_leaves_the_connection_to_the_others() -> None:
    async with serving(max_send_s=0.3) as system:
        reader = _SlowReader(await system.connect())
        unread = await reader.call(b"a")
        await reader.other_is_answered()
        await reader.caller.end(unread)
        assert _resets(reader.caller, unread) == [_ENHANCE_YOUR_CALM]
        await reader.other_is_answered()
        assert (_calls_ended(system), system.ended("max_send_s")) == (1, 0)


async def test_a_call_that_still_answers_a_caller_that_does_not_read_is_cancelled() -> None:
    is_cancelled = asyncio.Event()

    async def answer(call: ServerCall, request: bytes | None) -> None:
        try:
            while True:
                await call.send(b"a" * 100_000)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async with serving(answer, max_send_s=0.2) as system:
        reader = _SlowReader(await system.connect())
        unread = await reader.call(b"a")
        async with asyncio.timeout(_LIMIT_S):
            await is_cancelled.wait()
        await reader.caller.end(unread)
        assert _resets(reader.caller, unread) == [_ENHANCE_YOUR_CALM]
        assert _goaways(reader.caller) == []


async def test_where_too_many_answers_wait_the_oldest_one_is_reset_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_module, "_MAX_WAITS", 3)
    monkeypatch.setattr(caller_waits, "_PATIENCE_S", 0.0)
    async with serving() as system:
        reader = _SlowReader(await system.connect())
        unread = []
        for count in range(1, 5):
            unread.append(await reader.call(b"a"))
            await happens(lambda count=count: len(_connection(system)._unread.waits) >= min(count, 3))  # type: ignore[misc]
            await asyncio.sleep(0.002)  # so that one has waited longer
        await reader.caller.end(unread[0])
        assert [_resets(reader.caller, number) for number in unread] == [[_ENHANCE_YOUR_CALM], [], [], []]
        assert system.ended("max_send_s") == 0
        assert _calls_ended(system) == 1


async def test_of_answers_beyond_the_budget_the_largest_is_reset_alone() -> None:
    async with serving(max_message_bytes=_MIB, max_receiving_bytes=4 * _MIB) as system:
        reader = _SlowReader(await system.connect())
        small = await reader.call(b"x" * 200_000)
        large = [await reader.call(b"x" * size_bytes) for size_bytes in (900_000, 950_000)]
        await happens(lambda: _calls_ended(system) == 0 and len(_connection(system)._unread.waits) == 3)
        large.append(await reader.call(b"x" * 800_000))  # beyond the 2 MiB of a connection
        await reader.caller.end(large[1])
        assert [_resets(reader.caller, number) for number in (small, *large)] == [[], [], [_ENHANCE_YOUR_CALM], []]
        await reader.other_is_answered()
        assert (_calls_ended(system), system.ended("max_send_s")) == (1, 0)
        assert 1_900_000 <= system.server.options.in_flight.unread._bytes <= 2 * _MIB


# --- the last piece of a message ---


async def test_a_call_whose_last_piece_finds_no_room_is_told_so() -> None:
    async with serving(max_message_bytes=_MIB, max_receiving_bytes=_MIB) as system:
        budget = system.server.options.in_flight.budget
        caller = await system.connect()
        number, wire = caller.open(), frames.message(b"x" * 150_000)
        caller.send(number, wire[:-1000])
        await happens(lambda: budget._bytes == 149_000)
        # Another message of the connection fills its share, up to less than the last piece.
        claim = Claim(str(id(_connection(system))), lambda error: None)
        budget.grow(claim, _MIB - 149_500)
        caller.send(number, wire[-1000:], ends=True)
        assert await caller.code(number) == "RESOURCE_EXHAUSTED"
        assert b"max_receiving_bytes" in (await caller.end(number))[b"grpc-message"]
        budget.release(claim)
        assert await caller.code(caller.call(b"a")) == "OK"


# --- the end ---


@pytest.mark.parametrize("is_ready_s", [0.0, 0.05], ids=["before the stop", "after it"])
async def test_answers_that_a_notice_holds_back_are_sent_though_a_stop_follows_at_once(is_ready_s: float) -> None:
    held = Held()
    async with connected(held) as (system, caller):
        held.may_answer.set()
        assert await caller.code(caller.call(b"a")) == "OK"
        held.may_answer.clear()
        numbers = [caller.call(b"a") for _ in range(2)]
        await happens(lambda: system.method.accepted == 3)
        _connection(system)._give_notice()
        if not is_ready_s:
            held.may_answer.set()
            await happens(lambda: system.method.ended == 3)
        assert _connection(system).leaving.holds_answers
        stopping = asyncio.create_task(system.server.stop(_LIMIT_S))
        await asyncio.sleep(is_ready_s)
        held.may_answer.set()
        async with asyncio.timeout(_LIMIT_S / 2):
            assert [await caller.code(number) for number in numbers] == ["OK", "OK"]
            await stopping
