"""rpc/http2/server.py by its frames: what no gRPC client sends, and what each end of a call looks like."""

import asyncio
import base64
import contextlib
import gc
import gzip
import socket
import ssl
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc.code_pb2 import Code
from ngh2.events import ConnectionClosed, GoAwayReceived, StreamReset

from neuronpipe.core.errors import Overloaded
from neuronpipe.platform.tls import ServerTls, TlsFiles
from neuronpipe.rpc.http2 import closing as closing_module
from neuronpipe.rpc.http2 import server as server_module
from neuronpipe.rpc.http2.call import Http2Call
from neuronpipe.rpc.http2.connection import CLOSING
from neuronpipe.rpc.http2.stream import MessageStream
from neuronpipe.rpc.transport import CallEnd, ServerCall
from tests.interop import frames
from tests.servers.certificates import Authority
from tests.suite.waiting import happens
from tests.unit.rpc.http2.serving import Answer, Caller, Held, System, connected, echo_all, serving

_LIMIT_S = 10
_CALL_HEAD = frames.block(frames.call_fields("/a/Echo"))
_NO_ERROR, _REFUSED_STREAM, _ENHANCE_YOUR_CALM = 0, 7, 11


async def test_a_message_in_pieces_and_messages_in_one_piece_are_the_same() -> None:
    async with connected(echo_all, takes_stream=True) as (_, caller):
        messages = [b"", b"a", b"b" * 100, b"c" * 70_000]
        wire = b"".join(map(frames.message, messages))
        whole = caller.open()
        caller.send(whole, wire, ends=True)
        pieces = caller.open()
        for at in range(300):
            caller.send(pieces, wire[at : at + 1])
        caller.send(pieces, wire[300:], ends=True)
        assert [await caller.code(number) for number in (whole, pieces)] == ["OK", "OK"]
        assert caller.received(whole) == caller.received(pieces) == wire


def test_short_pieces_of_a_message_are_kept_as_one() -> None:
    carrier: Any = SimpleNamespace(acknowledge=lambda size_bytes, number: None)
    stream = MessageStream(carrier, 1, 1 << 20)
    for byte in frames.message(b"x" * 10_000)[:9_000]:
        stream.receive(bytes([byte]))
    assert len(stream._chunks) == 1


@pytest.mark.parametrize(
    ("encoding", "data"),
    [(b"gzip", gzip.compress(b"text" * 99, mtime=0)), (b"deflate", zlib.compress(b"text" * 99))],
    ids=["gzip", "deflate"],
)
async def test_a_compressed_message_is_inflated(encoding: bytes, data: bytes) -> None:
    async with connected() as (_, caller):
        number = caller.open("/a/Echo", (b"grpc-encoding", encoding))
        caller.send(number, frames.message(data, flag=1), ends=True)
        assert await caller.code(number) == "OK"
        assert caller.received(number) == frames.message(b"text" * 99)


@pytest.mark.parametrize("size_bytes", [1 << 21, 1 << 26])
async def test_a_message_that_becomes_too_large_is_refused_without_becoming_it(size_bytes: int) -> None:
    async with connected(max_message_bytes=1 << 20) as (_, caller):
        number = caller.open("/a/Echo", (b"grpc-encoding", b"gzip"))
        caller.send(number, frames.message(gzip.compress(b"\0" * size_bytes), flag=1), ends=True)
        assert await caller.code(number) == "RESOURCE_EXHAUSTED"
        assert b"the limit is 1048576; send less at once" in (await caller.end(number))[b"grpc-message"]


@pytest.mark.parametrize(
    ("fields", "data", "code"),
    [
        ([(b"grpc-encoding", b"snappy")], frames.message(b"a"), "UNIMPLEMENTED"),
        ([], frames.message(b"a", flag=1), "INTERNAL"),
        ([(b"grpc-encoding", b"identity")], frames.message(b"a", flag=1), "INTERNAL"),
        ([(b"grpc-encoding", b"gzip")], frames.message(b"no gzip", flag=1), "INTERNAL"),
        ([(b"grpc-encoding", b"gzip")], frames.message(gzip.compress(b"a" * 99, mtime=0)[:20], flag=1), "INTERNAL"),
        ([], frames.message(b"a", flag=2), "INTERNAL"),
        ([], frames.message(b"abc")[:-1], "INTERNAL"),
        ([], b"\0\0", "INTERNAL"),
        ([], 2 * frames.message(b"a"), "UNIMPLEMENTED"),
        ([(b"grpc-encoding", b"gzip")], 2 * frames.message(gzip.compress(b"a"), flag=1), "UNIMPLEMENTED"),
        ([], frames.message(b"a") + b"\0", "INTERNAL"),
        ([], frames.message(b"a") + frames.message(b"abc")[:-1], "INTERNAL"),
        ([(b"grpc-timeout", b"1")], frames.message(b"a"), "INTERNAL"),
        ([(b"grpc-timeout", b"123456789S")], frames.message(b"a"), "INTERNAL"),
        ([(b"grpc-timeout", b"-1S")], frames.message(b"a"), "INTERNAL"),
        ([(b"some-bin", b"!")], frames.message(b"a"), "INTERNAL"),
        ([(b"grpc-timeout", b"0n")], frames.message(b"a"), "DEADLINE_EXCEEDED"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_no_grpc_ends_its_call_alone(fields: list[tuple[bytes, bytes]], data: bytes, code: str) -> None:
    async def slow(call: ServerCall, request: bytes | None) -> None:
        await asyncio.sleep(0.05)
        await call.send(b"answer")

    async with connected(slow) as (_, caller):
        next_call = caller.open()
        number = caller.open("/a/Echo", *fields)
        caller.send(number, data, ends=True)
        assert await caller.code(number) == code
        caller.send(next_call, frames.message(b"a"), ends=True)
        assert await caller.code(next_call) == "OK"


async def test_a_second_message_ends_the_work_on_the_first() -> None:
    held = Held()
    async with connected(held) as (system, caller):
        number = caller.open()
        caller.send(number, frames.message(b"a"))
        await happens(lambda: any(call.task for peer in system.server.connections for call in peer.streams.values()))
        caller.send(number, frames.message(b"b"), ends=True)
        assert await caller.code(number) == "UNIMPLEMENTED"
        assert (await caller.end(number))[b"grpc-message"] == b"this method takes one message, and more came"
        assert not held.may_answer.is_set()


async def test_the_end_of_a_side_may_come_behind_its_message() -> None:
    held = Held()
    async with connected(held) as (system, caller):
        number = caller.open()
        caller.send(number, frames.message(b"a"))
        await happens(lambda: any(call.task for peer in system.server.connections for call in peer.streams.values()))
        caller.send(number, b"", ends=True)
        held.may_answer.set()
        assert await caller.code(number) == "OK"


async def test_a_caller_may_end_its_messages_by_trailers() -> None:
    async with connected(echo_all, takes_stream=True) as (_, caller):
        for data, code in ((frames.message(b"a"), "OK"), (frames.message(b"a")[:-1], "INTERNAL"), (b"", "OK")):
            number = caller.open()
            caller.send(number, data)
            caller.engine.send_trailers(number, [(b"some", b"thing")])
            caller.flush()
            assert await asyncio.wait_for(caller.code(number), _LIMIT_S) == code


async def test_binary_metadata_arrive_as_bytes() -> None:
    seen: list[Any] = []

    async def answer(call: ServerCall, request: bytes | None) -> None:
        seen.extend(call.metadata)
        raise CallEnd(Code.ABORTED, "für 100 %", (("more-bin", b"\0\1"), ("more", "text")))

    async with connected(answer) as (_, caller):
        fields = [(b"one-bin", base64.b64encode(b"\0") + b"," + base64.b64encode(b"\1\2").rstrip(b"=")), (b"two", b"2")]
        number = caller.call(b"a", "/a/Echo", *fields)
        end = await caller.end(number)
        assert seen == [("one-bin", b"\0"), ("one-bin", b"\1\2"), ("two", "2")]
        assert (end[b"grpc-status"], end[b"grpc-message"]) == (b"10", b"f%C3%BCr 100 %25")
        assert (base64.b64decode(end[b"more-bin"] + b"=="), end[b"more"]) == (b"\0\1", b"text")


@pytest.mark.parametrize("fields", [[(b"x-large", b"a" * 100_000)], [(b"x-%d" % n, b"a") for n in range(3000)]])
async def test_large_metadata_reach_the_door_and_harm_no_other_call(fields: list[tuple[bytes, bytes]]) -> None:
    sizes: list[int] = []

    async def answer(call: ServerCall, request: bytes | None) -> None:
        sizes.append(call.metadata_bytes)

    async with connected(answer) as (_, caller):
        next_call = caller.open()
        number = caller.call(b"a", "/a/Echo", *fields)
        assert await caller.code(number) == "OK"
        assert sizes[0] >= sum(len(name) + len(value) for name, value in fields)
        caller.send(next_call, frames.message(b"a"), ends=True)
        assert await caller.code(next_call) == "OK"


async def test_metadata_beyond_the_limit_are_neither_kept_nor_decoded() -> None:
    seen: list[Any] = []

    async def answer(call: ServerCall, request: bytes | None) -> None:
        seen.append((call.metadata_bytes, sum(len(value) for _, value in call.metadata)))

    async with connected(answer, max_header_bytes=4096) as (_, caller):
        # Of each comma a value would be made, and of an entry of HPACK's table, which has one byte, thousands of them.
        for fields in ([(b"x-bin", b"," * 200)], [(b"x", b"a" * 3000)] * 60):
            assert await caller.code(caller.call(b"a", "/a/Echo", *fields)) == "OK"
        assert [size_bytes > 4096 and kept_bytes <= 4096 for size_bytes, kept_bytes in seen] == [True, True]
        assert seen[0][1] == 0


async def test_messages_that_nobody_reads_count_as_arriving_until_they_are_read() -> None:
    may_read, ends = asyncio.Event(), asyncio.Event()

    async def answer(call: ServerCall, request: bytes | None) -> None:
        await may_read.wait()
        await call.read()
        await call.read()
        await ends.wait()

    mib = 1 << 20
    async with serving(answer, takes_stream=True, max_message_bytes=mib, max_receiving_bytes=4 * mib) as system:
        caller = await system.connect()
        numbers = [caller.open() for _ in range(4)]
        for number in numbers:
            caller.send(number, frames.message(b"x" * 900_000))
            caller.send(number, frames.message(b"a"))
        # A connection has half of the budget.
        await happens(lambda: [bool(call.error) for call in _calls(system)] == [False, False, True, True])
        assert len(_claims(system)) == 2
        may_read.set()
        await happens(lambda: not _claims(system))
        assert [await caller.code(number) for number in numbers[2:]] == ["RESOURCE_EXHAUSTED"] * 2
        ends.set()
        assert [await caller.code(number) for number in numbers[:2]] == ["OK", "OK"]


def _goaways(caller: Caller) -> list[GoAwayReceived]:
    return [event for event in caller.events if isinstance(event, GoAwayReceived)]


def _calls(system: System) -> list[Http2Call]:
    return [call for connection in system.server.connections for call in connection.streams.values()]


def _claims(system: System) -> list[int]:
    return [call.claim.bytes for call in _calls(system) if call.claim]


async def test_frames_that_take_a_turn_of_the_event_loop_leave_the_next_one_to_others() -> None:
    async with serving() as system:
        caller, quick = await system.connect(), await system.connect()
        number = caller.open()
        await happens(lambda: len(system.server.connections) == 2)
        caller.writer.write(frames.frame(frames.DATA, 0, number, b"\0\0\xff\xff\xff"))
        caller.writer.write(frames.frame(frames.DATA, 0, number, b"a") * 100_000)
        async with asyncio.timeout(_LIMIT_S):
            while not any(connection._input.waiting for connection in system.server.connections):
                await asyncio.sleep(0)
        assert await quick.code(quick.call(b"a")) == "OK"
        assert any(connection._input.waiting for connection in system.server.connections)


async def test_a_call_that_is_answered_early_is_reset_without_an_error_after_its_status() -> None:
    async with connected() as (_, caller):
        number = caller.open()
        caller.send(number, frames.message(b"a"))  # its side stays open
        assert await caller.code(number) == "OK"
        assert [event.error_code for event in caller.of(number, StreamReset)] == [_NO_ERROR]
        assert caller.received(number) == frames.message(b"a")


async def test_a_refused_call_is_ended_by_its_head_and_its_data_is_let_through_and_dropped() -> None:
    async with serving() as system:
        system.method.refuses = Overloaded("no room", retry_after_s=1)
        caller = await system.connect()
        for _ in range(40):  # 40 MB, more than the window of the connection
            number = caller.open()
            caller.send(number, frames.message(b"x" * (1 << 20)), ends=True)
            assert await caller.code(number) == "RESOURCE_EXHAUSTED"
        assert system.method.accepted == 0


async def test_calls_behind_a_refused_one_are_read_together_and_answered() -> None:
    async with serving() as system:
        system.method.refuses = Overloaded("no room", retry_after_s=1)
        caller = await system.connect()
        assert await caller.code(caller.open()) == "RESOURCE_EXHAUSTED"
        [connection] = system.server.connections
        reads = 0

        def count(data: bytes, read: Callable[[bytes], None] = connection.data_received) -> None:
            nonlocal reads
            reads += 1
            read(data)

        connection.data_received = count  # type: ignore[method-assign]
        began_s = time.monotonic()
        numbers = []
        for _ in range(200):
            numbers.append(caller.open())
            await asyncio.sleep(0)
        for number in numbers:
            assert await caller.code(number) == "RESOURCE_EXHAUSTED"
        # A timer may be early by a millisecond.
        assert reads <= 2 + (time.monotonic() - began_s) / 0.001
        system.method.refuses = None
        assert await caller.code(caller.call(b"a")) == "OK"


async def test_a_call_does_not_wait_for_all_calls_of_another_connection() -> None:
    begun: list[str] = []

    async def note(call: ServerCall, request: bytes | None) -> None:
        begun.append(call.peer)
        await call.send(b"")

    async with serving(note, max_connection_calls=1000) as system:
        many, single = await system.connect(), await system.connect()
        for caller in many, single:
            assert await caller.code(caller.call(b"a")) == "OK"
        of_one = begun.pop()
        begun.clear()
        numbers = [many.call(b"a") for _ in range(500)]
        assert await single.code(single.call(b"a")) == "OK"
        assert begun.index(of_one) < 100
        for number in numbers:
            assert await many.code(number) == "OK"
        assert len(begun) == 501


def _echo_once(may_read: asyncio.Event) -> Answer:
    async def answer(call: ServerCall, request: bytes | None) -> None:
        await may_read.wait()
        await echo_all(call, request)

    return answer


async def test_a_streams_window_is_held_while_its_messages_wait_unread() -> None:
    may_read = asyncio.Event()
    async with connected(_echo_once(may_read), takes_stream=True) as (_, caller):
        number = caller.open()
        wire = frames.message(b"x" * 100_000) * 50
        caller.send(number, wire)
        await asyncio.sleep(0.2)  # to prove that nothing happens
        assert caller.engine.queued_body_size(number) > len(wire) - (2 << 20)
        may_read.set()
        caller.send(number, b"", ends=True)
        assert await caller.code(number) == "OK"
        assert caller.received(number) == wire


async def test_many_empty_messages_are_held_as_large_ones_are() -> None:
    async with connected(_echo_once(asyncio.Event()), takes_stream=True) as (system, caller):
        number = caller.open()
        caller.send(number, frames.message(b"") * 600_000)  # 3 MB
        await asyncio.sleep(0.2)  # to prove that nothing happens
        assert caller.engine.queued_body_size(number) > 1 << 20
        caller.engine.reset_stream(number)
        caller.flush()
        await happens(lambda: system.method.ended == 1)


async def test_messages_that_arrive_slowly_share_a_budget() -> None:
    async with connected(max_message_bytes=1 << 20, max_receiving_bytes=1 << 20) as (_, caller):
        numbers = [caller.open() for _ in range(8)]
        for number in numbers:
            caller.send(number, frames.message(b"x" * 500_000)[:400_000])
        codes = [await caller.code(number) for number in numbers[3:]]
        assert set(codes) == {"RESOURCE_EXHAUSTED"}
        one_more = caller.call(b"a")
        assert await caller.code(one_more) == "OK"


async def test_a_call_that_is_reset_before_it_runs_is_not_counted_any_more() -> None:
    async with connected() as (system, caller):
        for _ in range(50):
            number = caller.open()
            caller.send(number, frames.message(b"a"), ends=True)
            caller.engine.reset_stream(number)
            caller.flush()
            await asyncio.sleep(0.001)
        await happens(lambda: system.method.accepted > 0 and system.method.accepted == system.method.ended)


@pytest.mark.parametrize("leaves_responses_unread", [False, True])
async def test_nothing_of_a_caller_who_leaves_waits_for_the_garbage_collector(leaves_responses_unread: bool) -> None:
    async def answer(call: ServerCall, request: bytes | None) -> None:
        while leaves_responses_unread:
            await call.send(b"a" * (1 << 20))
        await asyncio.sleep(3600)

    async with connected(answer) as (system, caller):
        caller.call(b"a")
        await happens(lambda: system.method.accepted == 1)
        connection = weakref.ref(next(iter(system.server.connections)))
        gc.disable()
        try:
            await caller.close()
            await happens(lambda: connection() is None)
        finally:
            gc.enable()


async def test_a_deadline_ends_a_stream_whose_method_goes_on() -> None:
    ended: list[str] = []

    async def answer(call: ServerCall, request: bytes | None) -> None:
        try:
            while True:
                await call.send(b"more")
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with connected(answer) as (_, caller):
        number = caller.call(b"a", "/a/Echo", (b"grpc-timeout", b"100m"))
        assert await caller.code(number) == "DEADLINE_EXCEEDED"
        await happens(lambda: ended == ["cancelled"])


async def test_a_fault_of_the_method_ends_its_call_as_internal() -> None:
    async def answer(call: ServerCall, request: bytes | None) -> None:
        raise ValueError("secret")

    async with connected(answer) as (_, caller):
        number = caller.call(b"a")
        assert await caller.code(number) == "INTERNAL"
        assert b"secret" not in (await caller.end(number)).get(b"grpc-message", b"")


async def test_what_is_no_grpc_is_told_by_http() -> None:
    async with connected() as (_, caller):
        number = caller.engine.send_request(
            [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")], end_stream=True
        )
        caller.flush()
        assert (await caller.end(number))[b":status"] == b"415"
        assert b"gRPC" in caller.received(number)
        unknown = caller.call(b"a", "/a/Unknown")
        assert await caller.code(unknown) == "UNIMPLEMENTED"


async def test_a_stop_answers_what_is_on_its_way_and_refuses_what_comes_later() -> None:
    answer = Held(b"answer")
    async with connected(answer) as (system, caller):
        first = caller.call(b"a")
        await happens(lambda: system.method.accepted == 1)
        system.server.ask_to_leave()
        late = caller.call(b"a")  # sent before the caller has heard of it
        await happens(lambda: len(_goaways(caller)) == 2)
        stopping = asyncio.create_task(system.server.stop(_LIMIT_S))
        await asyncio.sleep(0.05)  # to prove that nothing happens
        assert not stopping.done()
        answer.may_answer.set()
        assert [await caller.code(number) for number in (first, late)] == ["OK", "OK"]
        await asyncio.wait_for(stopping, _LIMIT_S)
        notice, final = _goaways(caller)
        assert (notice.last_stream_id, final.last_stream_id) == ((1 << 31) - 1, late)
        assert {notice.error_code, final.error_code} == {_NO_ERROR}


class _FrameCaller:
    """A client that opens streams as it likes, also those that it should not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._come: list[tuple[int, int, int, bytes]] = []
        self._rest = b""
        writer.write(frames.PREFACE + frames.settings() + frames.frame(frames.SETTINGS, frames.ACK))

    def call(self, number: int) -> None:
        self._writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, number, _CALL_HEAD))
        self._writer.write(frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(b"a")))

    def close(self) -> None:
        self._writer.close()

    def acknowledge(self, ping: bytes) -> None:
        self._writer.write(frames.frame(frames.PING, frames.ACK, payload=ping))

    async def next(self, *kinds: int) -> tuple[int, int, bytes]:
        """Kind, stream and payload of the next frame of these kinds."""
        while True:
            while self._come:
                kind, _, stream, payload = self._come.pop(0)
                if kind in kinds:
                    return kind, stream, payload
            received = await asyncio.wait_for(self._reader.read(1 << 16), _LIMIT_S)
            self._come, self._rest = frames.frames_in(self._rest + received)


async def test_a_caller_whose_calls_hear_of_the_stop_late_loses_none() -> None:
    async with serving() as system:
        caller = _FrameCaller(*await asyncio.open_connection("127.0.0.1", system.port))
        caller.call(1)
        await caller.next(frames.DATA)
        system.server.ask_to_leave()
        _, _, ping = await caller.next(frames.PING)
        caller.acknowledge(ping)
        for number in range(3, 15, 2):
            caller.call(number)
            assert (await caller.next(frames.DATA))[1] == number
            await asyncio.sleep(0.1)  # in all three times as long as a stop waits for a stream that comes late
        _, _, final = await caller.next(frames.GOAWAY)
        assert int.from_bytes(final[:4], "big") == 13
        caller.close()


async def test_answers_wait_a_moment_at_most_until_the_notice_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_HOLD_S", 1.0)
    answer = Held(b"answer")
    async with serving(answer) as system:
        callers = [_FrameCaller(*await asyncio.open_connection("127.0.0.1", system.port)) for _ in range(2)]
        for caller in callers:
            caller.call(1)
        await happens(lambda: system.method.accepted == 2)
        for connection in system.server.connections:
            connection._give_notice()
        answer.may_answer.set()
        for caller in callers:
            for awaited in (frames.GOAWAY, frames.PING):
                kind, _, ping = await caller.next(frames.GOAWAY, frames.PING, frames.DATA)
                assert kind == awaited
        callers[0].acknowledge(ping)
        waits = [asyncio.create_task(caller.next(frames.DATA)) for caller in callers]
        await waits[0]
        assert not waits[1].done()
        await waits[1]
        for caller in callers:
            caller.close()


async def test_a_stop_right_after_a_connection_was_made_sends_the_answer_of_its_first_call() -> None:
    answer = Held(b"answer")
    async with connected(answer) as (system, caller):
        number = caller.call(b"a")
        await happens(lambda: system.method.accepted == 1)
        stopping = asyncio.create_task(system.server.stop(_LIMIT_S))
        await asyncio.sleep(0.4)  # beyond the time after which a connection without a first call is asked to leave
        answer.may_answer.set()
        async with asyncio.timeout(_LIMIT_S / 2):
            assert await caller.code(number) == "OK"
            await stopping


async def test_calls_for_which_a_stop_has_no_more_time_are_told_so() -> None:
    async def answer(call: ServerCall, request: bytes | None) -> None:
        await call.send(b"a part")
        await asyncio.Event().wait()

    async with connected(answer) as (system, caller):
        numbers = [caller.call(b"a") for _ in range(2)]
        await happens(lambda: all(map(caller.received, numbers)))
        await system.server.stop(0.05)
        assert [await caller.code(number) for number in numbers] == ["UNAVAILABLE"] * 2
        await happens(lambda: system.method.ended == 2)


async def test_a_stream_that_comes_at_the_end_of_a_stop_is_one_that_clients_repeat() -> None:
    async with connected() as (system, caller):
        assert await caller.code(caller.call(b"a")) == "OK"
        system.server.is_stopping = True
        number = caller.call(b"a")
        assert await caller.code(number) == "reset"
        assert [event.error_code for event in caller.of(number, StreamReset)] == [_REFUSED_STREAM]
        system.server.is_stopping = False


async def test_a_flood_of_frames_that_bring_nothing_ends_the_connection_which_is_told_why() -> None:
    async with connected() as (system, caller):
        for _ in range(600):
            caller.engine.ping(b"01234567")
        caller.flush()
        await happens(lambda: bool(_goaways(caller)))
        [end] = _goaways(caller)
        assert end.error_code == _ENHANCE_YOUR_CALM
        await happens(lambda: not system.server.connections)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames.PREFACE + frames.settings() + frames.frame(frames.DATA, payload=b"of no stream"),
        frames.PREFACE + frames.settings() + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff" * 8),
        frames.PREFACE + frames.settings() + frames.frame(frames.SETTINGS) * 600,
    ],
    ids=["no HTTP/2", "a frame of no stream", "no HPACK", "a flood"],
)
async def test_a_connection_that_breaks_the_protocol_is_counted(data: bytes) -> None:
    async with serving() as system:
        reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
        writer.write(data)
        await asyncio.wait_for(reader.read(), _LIMIT_S)
        assert system.ended("protocol") == 1
        writer.close()


async def test_a_call_whose_message_has_not_come_can_be_refused_without_loss() -> None:
    async with connected() as (system, caller):
        silent, half, whole = caller.open(), caller.open(), caller.open()
        caller.send(half, frames.message(b"a" * 100)[:50])
        await happens(lambda: system.method.accepted == 3)
        caller.send(whole, frames.message(b"a"), ends=True)
        assert await caller.code(whole) == "OK"
        system.server.options.in_flight.refuse_arriving()
        assert await caller.code(silent) == await caller.code(half) == "reset"
        resets = [event.error_code for number in (silent, half) for event in caller.of(number, StreamReset)]
        assert resets == [_REFUSED_STREAM] * 2
        assert system.method.ended == 3


async def test_a_caller_that_acknowledges_nothing_delays_the_end_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_module, "_LINGER_S", 0.05)
    async with serving() as system:
        _, writer = await asyncio.open_connection("127.0.0.1", system.port)
        await happens(lambda: bool(system.server.connections))
        await asyncio.wait_for(system.server.stop(30), 4)  # the notice has five seconds
        writer.close()


async def test_a_connection_that_the_caller_ends_with_an_error_is_not_counted() -> None:
    async with connected() as (system, caller):
        assert await caller.code(caller.call(b"a")) == "OK"
        caller.engine.send_goaway(_ENHANCE_YOUR_CALM)
        caller.flush()
        await happens(lambda: not system.server.connections)
        assert system.ended("protocol") == 0


async def test_handshakes_count_as_connections_until_they_are_over(tmp_path: Path) -> None:
    authority = Authority()
    authority.issue("localhost").write(tmp_path)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"))
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    trusted.set_alpn_protocols(["h2"])
    async with serving(tls=tls, max_connections=3, max_handshake_s=_LIMIT_S) as system:
        silent = [await asyncio.open_connection("127.0.0.1", system.port) for _ in range(3)]
        reader, one_more = await asyncio.open_connection("127.0.0.1", system.port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), _LIMIT_S) == b""
        assert system.ended("max_connections") == 1
        silent[0][1].write(b"no TLS")
        await happens(lambda: len(system.server.listener.handshakes) == 2)
        greeted, secure = await asyncio.open_connection(
            "127.0.0.1", system.port, ssl=trusted, server_hostname="localhost"
        )
        assert await greeted.read(1)
        assert (len(system.server.connections), len(system.server.listener.handshakes)) == (1, 2)
        for writer in (one_more, secure, *(writer for _, writer in silent)):
            writer.close()
        await happens(lambda: not (system.server.connections or system.server.listener.handshakes))


_ASKED = frames.PREFACE + frames.settings(((frames.INITIAL_WINDOW_SIZE, 1 << 24),)) + frames.window_update(0, 1 << 24)
_ASKED += frames.frame(frames.HEADERS, frames.END_HEADERS, 1, _CALL_HEAD)
_ASKED += frames.frame(frames.DATA, frames.END_STREAM, 1, frames.message(b"a"))
_UNREAD_BYTES = 100_000
_PARTS, _PART_BYTES = 15, 1 << 20


async def _narrow_socket(system: System) -> socket.socket:
    """A caller's socket that holds little of what it does not read."""
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    caller.settimeout(_LIMIT_S)
    await asyncio.to_thread(caller.connect, ("127.0.0.1", system.port))
    return caller


async def _narrow_end(system: System) -> Any:
    """The server's end of the only connection, once a call is open; its socket holds little, too."""
    await happens(lambda: any(connection.streams for connection in system.server.connections))
    (connection,) = system.server.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    return connection


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
async def test_an_answer_that_is_read_slowly_is_whole_though_its_connection_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    monkeypatch.setattr(closing_module, "TLS_CLOSE_S", 0.05)
    monkeypatch.setattr(closing_module, "_LINGER_S", 0.05)
    authority = Authority()
    authority.issue("localhost").write(tmp_path)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")) if is_tls else None
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    trusted.set_alpn_protocols(["h2"])
    answer = Held(b"a" * _UNREAD_BYTES)
    async with serving(answer, tls=tls) as system:
        caller = await _narrow_socket(system)
        if is_tls:
            caller = await asyncio.to_thread(trusted.wrap_socket, caller, server_hostname="localhost")
        await asyncio.to_thread(caller.sendall, _ASKED)
        end = await _narrow_end(system)
        end.take_no_more()
        answer.may_answer.set()
        await happens(lambda: end.state is CLOSING)
        await asyncio.sleep(0.5)  # in which nothing may be given up
        received = b""
        while part := await asyncio.to_thread(caller.recv, 1 << 16):
            received += part
        sizes = [len(data) for kind, _, _, data in frames.frames_in(received)[0] if kind == frames.DATA]
        assert sum(sizes) == 5 + _UNREAD_BYTES
        caller.close()


async def test_a_connection_that_closes_does_not_wait_for_ever_for_a_caller_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing_module, "CLOSE_LIMIT_S", 0.3)
    monkeypatch.setattr(closing_module, "_LINGER_S", 0.05)
    answer = Held(b"a" * _UNREAD_BYTES)
    async with serving(answer) as system:
        caller = await _narrow_socket(system)
        await asyncio.to_thread(caller.sendall, _ASKED)
        end = await _narrow_end(system)
        answer.may_answer.set()
        await happens(lambda: end.transport.get_write_buffer_size() > 0)
        await asyncio.to_thread(caller.sendall, b"no frame of HTTP/2")
        await happens(lambda: not system.server.connections)
        caller.close()


async def _answer_in_parts(call: ServerCall, request: bytes | None) -> None:
    for _ in range(_PARTS):
        await call.send(b"a" * _PART_BYTES)


async def test_answers_for_which_the_windows_have_room_wait_for_a_caller_that_does_not_read() -> None:
    async with serving(_answer_in_parts) as system:
        caller = await _narrow_socket(system)
        await asyncio.to_thread(caller.sendall, _ASKED)
        end = await _narrow_end(system)
        await happens(lambda: end.outbox.is_paused)
        await asyncio.sleep(0.2)  # in which nothing more may be made
        assert end.transport.get_write_buffer_size() + end.engine.queued_body_size() < 2 * _PART_BYTES
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        end.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        left_bytes, rest = _PARTS * (5 + _PART_BYTES), b""
        while left_bytes > 0:
            found, rest = frames.frames_in(rest + await asyncio.to_thread(caller.recv, 1 << 20))
            left_bytes -= sum(len(data) for kind, _, _, data in found if kind == frames.DATA)
        assert left_bytes == 0
        await happens(lambda: not system.server.sends._pending)
        caller.close()


async def test_a_caller_that_never_reads_loses_its_connection_though_its_windows_have_room() -> None:
    async with serving(_answer_in_parts, max_send_s=0.3) as system:
        caller = await _narrow_socket(system)
        await asyncio.to_thread(caller.sendall, _ASKED)
        await _narrow_end(system)
        await happens(lambda: not system.server.connections)
        assert system.ended("max_send_s") == 1
        caller.close()


async def test_a_caller_that_takes_nothing_of_answers_of_many_bytes_loses_its_connection() -> None:
    answer = Held(b"a" * 900_000)
    async with serving(answer, max_message_bytes=1 << 20, max_receiving_bytes=4 << 20) as system:
        caller = await _narrow_socket(system)
        await asyncio.to_thread(caller.sendall, _ASKED)
        end = await _narrow_end(system)
        answer.may_answer.set()
        await happens(lambda: end.outbox.is_paused)
        for number in (3, 5):  # with the first one less than a connection's half of the budget
            assert not system.ended("max_send_s")
            call = frames.frame(frames.HEADERS, frames.END_HEADERS, number, _CALL_HEAD)
            call += frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(b"a"))
            await asyncio.to_thread(caller.sendall, call)
            await happens(lambda accepted=(number + 1) // 2: system.method.accepted == accepted)  # type: ignore[misc]
        await happens(lambda: not system.server.connections)
        assert system.ended("max_send_s") == 1
        assert not system.server.options.in_flight.unread._bytes
        caller.close()


async def test_an_idle_connection_is_asked_to_leave() -> None:
    async with connected(max_connection_idle_s=0.2) as (_, caller):
        assert await caller.code(caller.call(b"a")) == "OK"
        await happens(lambda: any(isinstance(event, ConnectionClosed) for event in caller.events))
