"""rpc/endpoints.py over real connections: a stream to every process behind a target, opened again whenever it is lost.

The processes are written by hand and send bytes, so that they can also send what no service of ours does.
"""

import asyncio
import contextlib
import gc
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import (
    Announcement,
    EncodedInput,
    ItemContext,
    ServedModel,
    TokenizeItem,
    TokenizeOutcome,
    TokenizeRequest,
    TokenizeResponse,
)
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.core import items
from neuronpipe.core.calls import Call
from neuronpipe.core.changes import Changes
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import NO_TENSORS, Packed, pack_input
from neuronpipe.core.status import to_status
from neuronpipe.core.streams import ModelNeeds, Outcome, Preparation, ProcessModels
from neuronpipe.rpc.endpoints import StageStream, follow_endpoints, resolve
from neuronpipe.rpc.http2.client import Http2Channel, _ClientConnection
from neuronpipe.rpc.items import TOKENIZE, StageMethod
from tests.interop import frames
from tests.servers.ports import free_port
from tests.suite.waiting import cancelled, happens
from tests.unit.every_error import EVERY_ERROR

_LIMIT_S = 10
# An empty message: the sign that a service takes items.
_READY = b""
# A message that says to be five bytes long, with one.
_BROKEN = b"\x0a\x05a"

_Requests: TypeAlias = AsyncIterator[TokenizeRequest]
_Answer: TypeAlias = Callable[[_Requests, Any], AsyncIterator[bytes]]


@asynccontextmanager
async def _process(
    answer: _Answer, address: str = "127.0.0.1:0", options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[str]:
    """A process that answers each stream so; gives its target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *options])
    handler: Any = grpc.stream_stream_rpc_method_handler(answer, request_deserializer=TokenizeRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKENIZE.service, {"Tokenize": handler}),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _saying(*numbers: int) -> _Answer:
    """Says its numbers, and then nothing until the stream ends."""

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        for number in numbers:
            yield _outcome(number)
        async for _ in requests:
            pass

    return answer


class _Refusing:
    """Refuses its first streams with a code, and serves the others."""

    def __init__(self, code: grpc.StatusCode, refusals: int) -> None:
        self.left = refusals
        self._code = code

    async def answer(self, requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        if self.left:
            self.left -= 1
            await context.abort(self._code, "the secret")
        yield _READY
        yield _outcome(1)
        async for _ in requests:
            pass


def _input(text: str) -> TaskInput:
    return TaskInput(text_classification=TextClassificationInput(text=text))


def _item(request_id: str = "", text: str = "", **call: Any) -> items.TokenizeItem:
    return items.TokenizeItem(Call(request_id, **call), ModelKey("m", 1), pack_input(_input(text)))


def _outcome(item_id: int) -> bytes:
    return TokenizeResponse(outcomes=[TokenizeOutcome(item_id=item_id)]).SerializeToString()


class _Served:
    """The receiver of the streams: keeps each until it is lost."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[StageStream] = asyncio.Queue()
        self.received: asyncio.Queue[int] = asyncio.Queue()
        self.lost = 0

    async def __call__(self, stream: StageStream) -> None:
        self.streams.put_nowait(stream)
        try:
            while True:
                for item_id, _ in (await stream.receive()).outcomes:
                    self.received.put_nowait(item_id)
        except Unavailable:
            return
        finally:
            self.lost += 1

    async def numbers(self, count: int) -> list[int]:
        """The next numbers that processes said."""
        return sorted([await asyncio.wait_for(self.received.get(), _LIMIT_S) for _ in range(count)])


@asynccontextmanager
async def _following(
    target: str, serve: Callable[[StageStream], Awaitable[None]]
) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(follow_endpoints(TOKENIZE, target, serve))
    try:
        yield task
    finally:
        await cancelled(task)


async def _send(
    stream: StageStream, sent: Sequence[tuple[int, items.StageItem]], abandoned_item_ids: Sequence[int] = ()
) -> Sequence[Outcome]:
    return await stream.send(sent, abandoned_item_ids, sum(item.size_bytes for _, item in sent))


@pytest.fixture
def served() -> _Served:
    return _Served()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is tried again is tried again soon."""
    for name in ("_RESOLVE_EVERY_S", "_PAUSE_S", "_REFUSED_PAUSE_S"):
        monkeypatch.setattr(f"neuronpipe.rpc.endpoints.{name}", 0.005)


async def test_a_stream_is_handed_on_once_the_process_says_that_it_takes_items(served: _Served) -> None:
    opened, ready = asyncio.Event(), asyncio.Event()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        opened.set()
        await ready.wait()
        yield _READY
        async for _ in requests:
            pass

    async with _process(answer) as target, _following(target, served):
        await asyncio.wait_for(opened.wait(), _LIMIT_S)
        await asyncio.sleep(0.05)  # nothing happens
        assert served.streams.empty()
        ready.set()
        await asyncio.wait_for(served.streams.get(), _LIMIT_S)


async def test_items_abandoned_items_and_outcomes_travel_over_a_stream() -> None:
    received: asyncio.Queue[TokenizeRequest] = asyncio.Queue()
    outcomes: asyncio.Queue[list[Outcome]] = asyncio.Queue()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        async for request in requests:
            received.put_nowait(request)
            yield b""
            input = EncodedInput(tokens=7)
            yield TokenizeResponse(outcomes=[TokenizeOutcome(item_id=5, encoded=input)]).SerializeToString()

    async def serve(stream: StageStream) -> None:
        assert await _send(stream, [(5, _item("mine", "a text"))], [3, 4]) == []
        outcomes.put_nowait(list((await stream.receive()).outcomes))
        outcomes.put_nowait(list((await stream.receive()).outcomes))
        await asyncio.Event().wait()

    async with _process(answer) as target, _following(target, serve):
        request = await asyncio.wait_for(received.get(), _LIMIT_S)
        item = TokenizeItem(
            context=ItemContext(item_id=5, request_id="mine"), model="m", version="1", input=_input("a text")
        )
        item.context.priority = Priority.PRIORITY_INTERACTIVE
        assert request == TokenizeRequest(items=[item], abandoned_item_ids=[3, 4])
        assert await asyncio.wait_for(outcomes.get(), _LIMIT_S) == []
        ((item_id, value),) = await asyncio.wait_for(outcomes.get(), _LIMIT_S)
        assert (item_id, value.tokens, len(value.sequences)) == (5, 7, 0)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED], ids=lambda code: code.name)
async def test_a_process_that_is_starting_or_stopping_is_asked_again_without_a_word_until_it_serves(
    served: _Served, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    refusing = _Refusing(code, 3)
    async with _process(refusing.answer) as target, _following(target, served):
        assert await served.numbers(1) == [1]
    assert refusing.left == 0
    assert caplog.records == []


@pytest.mark.parametrize("ending", ["ended", "aborted", "cancelled"])
async def test_a_stream_that_ends_is_opened_again(served: _Served, ending: str) -> None:
    opened = 0

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        nonlocal opened
        opened += 1
        yield _READY
        yield _outcome(opened)
        if opened > 1:
            async for _ in requests:
                pass
        elif ending == "aborted":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the tokenizer service is stopping")
        elif ending == "cancelled":
            await context.abort(grpc.StatusCode.CANCELLED, "the server stops")

    async with _process(answer) as target, _following(target, served):
        assert await served.numbers(2) == [1, 2]
        assert served.lost == 1


async def test_a_process_that_comes_back_at_its_address_gets_a_stream_again(served: _Served) -> None:
    first = _process(_saying(1))
    target = await first.__aenter__()
    async with _following(target, served):
        assert await served.numbers(1) == [1]
        await first.__aexit__(None, None, None)
        async with _process(_saying(2), target):
            assert await served.numbers(1) == [2]


async def test_a_connection_that_the_process_wants_to_end_gets_a_successor_and_its_items_are_answered_first() -> None:
    """A limit of a connection's age, or that of a proxy, costs no item and leaves no moment without a stream."""
    begun, open_now, fewest, go_on = 0, 0, 1, asyncio.Event()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        async for message in requests:
            await go_on.wait()
            for item in message.items:
                yield _outcome(item.context.item_id)

    async def serve(stream: StageStream) -> None:
        nonlocal begun, open_now, fewest
        begun, open_now = begun + 1, open_now + 1
        number = begun
        try:
            await _send(stream, [(number, _item())])
            if number > 1:
                go_on.set()  # the first item is answered once its connection has a successor
            [(item_id, _)] = (await stream.receive()).outcomes
            assert item_id == number
            await stream.retired.wait()
        finally:
            open_now -= 1
            fewest = min(fewest, open_now)

    async with _process(answer, options=[("grpc.max_connection_age_ms", 100)]) as target, _following(target, serve):
        await happens(lambda: begun == 3)
        assert fewest >= 1


async def test_every_address_of_a_target_gets_a_stream(served: _Served, tmp_path: Path) -> None:
    async with (
        _process(_saying(1)) as first,
        _process(_saying(2)) as second,
        _process(_saying(3), f"unix:{tmp_path}/socket") as third,
        _following(f"{first}, dns:///{second}, {third}", served),
    ):
        assert await served.numbers(3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:50051", {"ipv4:127.0.0.1:50051"}),
        ("[::1]:50051", {"ipv6:[::1]:50051"}),
        ("dns:///127.0.0.1:50051", {"ipv4:127.0.0.1:50051"}),
        ("unix:/run/a.sock", {"unix:/run/a.sock"}),
        ("127.0.0.1:1,127.0.0.1:2,127.0.0.1:1", {"ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"}),
        ("127.0.0.1:1, unix:/run/a.sock", {"ipv4:127.0.0.1:1", "unix:/run/a.sock"}),
    ],
)
async def test_an_address_is_written_as_grpc_takes_it(target: str, expected: set[str]) -> None:
    addresses, unresolved = await resolve(target)
    assert (set(addresses), unresolved) == (expected, {})


async def test_an_address_keeps_the_name_that_its_server_has_to_prove() -> None:
    addresses, _ = await resolve("localhost:50051, unix:/run/a.sock")
    assert addresses.pop("unix:/run/a.sock") == ""
    assert set(addresses.values()) == {"localhost:50051"}


class _Names:
    """Stands in for the resolver: what a name's addresses are, until the test says otherwise."""

    def __init__(self, *ports: int) -> None:
        self.ports: tuple[int, ...] | None = ports
        # Each answer names another one of these, where there are any.
        self.turns: list[int] = []
        self.asked = 0

    async def getaddrinfo(self, host: str, port: str, **options: Any) -> list[Any]:
        assert (host, port) == ("tokenizer.example", "80")
        self.asked += 1
        if self.ports is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        ports = [self.turns[self.asked % len(self.turns)]] if self.turns else self.ports
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]


_NAME = "tokenizer.example:80"


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> _Names:
    names = _Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    return names


def _port(target: str) -> int:
    return int(target.rpartition(":")[2])


async def test_a_name_that_cannot_be_resolved_is_logged_and_asked_again(
    served: _Served, names: _Names, caplog: pytest.LogCaptureFixture
) -> None:
    names.ports = None
    async with _process(_saying(1)) as target, _following(_NAME, served):
        await happens(lambda: names.asked > 1)
        names.ports = (_port(target),)
        assert await served.numbers(1) == [1]
    record = caplog.records[0]
    assert record.message == "a target cannot be resolved"
    assert record.__dict__["fields"] == {"target": _NAME, "problem": "Name or service not known"}


@pytest.mark.parametrize("name", ["tokenizer..example", f"{'x' * 64}.example"])
async def test_a_name_that_no_host_can_have_is_unresolved_as_any_other(name: str) -> None:
    assert await resolve(f"{name}:50051, unix:/run/a.sock") == (
        {"unix:/run/a.sock": ""},
        {f"{name}:50051": "no such name"},
    )


async def test_an_unresolved_name_leaves_other_targets_alone(served: _Served, names: _Names, tmp_path: Path) -> None:
    names.ports = None
    async with _process(_saying(1), f"unix:{tmp_path}/socket") as target, _following(f"{_NAME},{target}", served):
        assert await served.numbers(1) == [1]


async def test_an_address_that_a_name_gets_is_taken_up(served: _Served, names: _Names) -> None:
    async with _process(_saying(1)) as first, _process(_saying(2)) as second, _following(_NAME, served):
        names.ports = (_port(first),)
        assert await served.numbers(1) == [1]
        names.ports = (_port(first), _port(second))
        assert await served.numbers(1) == [2]
        assert served.lost == 0


class _Kept:
    """The receiver of the streams: keeps each until it is retired and the test lets it go."""

    def __init__(self) -> None:
        self.opened = 0
        self.retired = 0
        self.may_end = asyncio.Event()

    async def __call__(self, stream: StageStream) -> None:
        self.opened += 1
        await stream.retired.wait()
        self.retired += 1
        await self.may_end.wait()


@pytest.fixture
def kept() -> _Kept:
    return _Kept()


async def _answers(names: _Names, count: int) -> None:
    """Waits for so many answers that began after this."""
    asked = names.asked
    await happens(lambda: names.asked > asked + count)


async def test_an_address_that_a_name_loses_is_retired_and_its_stream_ends_when_nothing_is_in_flight(
    names: _Names, kept: _Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 3)
    left: list[int] = []

    def leaving(number: int) -> _Answer:
        async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
            try:
                yield _READY
                await asyncio.Event().wait()
            finally:
                left.append(number)

        return answer

    async with _process(leaving(1)) as first, _process(leaving(2)) as second:
        names.ports = (_port(first), _port(second))
        with caplog.at_level(logging.INFO, logger="neuronpipe"):
            async with _following(_NAME, kept):
                await happens(lambda: kept.opened == 2)
                names.ports = (_port(second),)
                await happens(lambda: kept.retired == 1)
                await _answers(names, 2)
                assert (left, kept.retired) == ([], 1)
                kept.may_end.set()
                await happens(lambda: left == [1])
                await _answers(names, 2)
                assert (left, kept.opened) == ([1], 2)
    expected = ["a stage's stream is open"] * 2 + ["a stage's address is gone"]
    assert [record.message for record in caplog.records] == expected
    assert caplog.records[2].__dict__["fields"] == {"rpc": TOKENIZE.path, "address": f"ipv4:{first}"}


async def test_an_address_that_is_not_connected_is_retired_too(
    names: _Names, kept: _Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 1)
    async with _process(_saying(1)) as target:
        names.ports = (1, _port(target))  # nobody listens on the first
        with caplog.at_level(logging.INFO, logger="neuronpipe"):
            async with _following(_NAME, kept) as following:
                await happens(lambda: kept.opened == 1)
                names.ports = (_port(target),)
                await happens(lambda: len(caplog.messages) == 3)
                await _answers(names, 2)
                assert not following.done()
    assert sorted(caplog.messages[:2]) == ["a stage cannot be reached", "a stage's stream is open"]
    assert caplog.messages[2:] == ["a stage's address is gone"]
    assert caplog.records[2].__dict__["fields"] == {"rpc": TOKENIZE.path, "address": "ipv4:127.0.0.1:1"}


async def test_answers_that_name_some_addresses_in_turn_retire_none(
    names: _Names, kept: _Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 3)
    async with _process(_saying(1)) as first, _process(_saying(2)) as second, _process(_saying(3)) as third:
        ports = [_port(target) for target in (first, second, third)]
        names.ports = tuple(ports)
        async with _following(_NAME, kept):
            await happens(lambda: kept.opened == 3)
            names.turns = ports
            await _answers(names, 12)
            assert (kept.opened, kept.retired) == (3, 0)


async def test_an_address_that_comes_back_after_it_was_retired_gets_a_new_stream(
    names: _Names, kept: _Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 1)
    async with _process(_saying(1)) as first, _process(_saying(2)) as second:
        names.ports = (_port(first), _port(second))
        async with _following(_NAME, kept):
            await happens(lambda: kept.opened == 2)
            names.ports = (_port(second),)
            await happens(lambda: kept.retired == 1)
            names.ports = (_port(first), _port(second))
            await happens(lambda: kept.opened == 3)


async def test_answers_that_fail_are_no_absences(names: _Names, kept: _Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 2)
    async with _process(_saying(1)) as first, _process(_saying(2)) as second:
        names.ports = (_port(first), _port(second))
        async with _following(_NAME, kept):
            await happens(lambda: kept.opened == 2)
            names.ports = None
            await _answers(names, 5)
            assert kept.retired == 0


@pytest.mark.parametrize("is_alone", [True, False])
async def test_addresses_of_a_name_stay_while_it_cannot_be_resolved(
    served: _Served, names: _Names, tmp_path: Path, is_alone: bool
) -> None:
    async with _process(_saying(1)) as first, _process(_saying(2), f"unix:{tmp_path}/socket") as second:
        names.ports = (_port(first),)
        async with _following(_NAME if is_alone else f"{_NAME},{second}", served):
            assert await served.numbers(1 if is_alone else 2) == [1, 2][: 1 if is_alone else 2]
            names.ports = None
            await _answers(names, 2)
            assert served.lost == 0


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
async def test_a_process_that_refuses_otherwise_is_logged_and_asked_again(
    served: _Served, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    async with _process(_Refusing(code, 2).answer) as target, _following(target, served):
        assert await served.numbers(1) == [1]
    assert [record.message for record in caplog.records] == ["a stage refuses its stream"] * 2
    expected = {"rpc": "/neuronpipe.api.v1.TokenizerService/Tokenize", "address": f"ipv4:{target}", "code": code.name}
    assert caplog.records[0].__dict__["fields"] == expected


@asynccontextmanager
async def _answering(greeting: bytes, answer: bytes = b"") -> AsyncIterator[str]:
    """A process that greets each connection so, answers its first call so, and ends it; gives its target."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the caller has left
            await reader.readexactly(len(frames.PREFACE))
            writer.write(greeting)
            kind = b""
            while answer and kind != bytes([frames.HEADERS]):
                head = await reader.readexactly(9)
                kind = head[3:4]
                await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


_HTTP_503 = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"\x08\x03503")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((b"",), "the server ends the connection"),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), "the server does not speak HTTP/2"),
        ((frames.settings(), _HTTP_503), "the server answered with HTTP 503"),
        ((frames.settings(), frames.reset(1)), "reset by HTTP/2 code 8"),
    ],
    ids=["nothing", "HTTP/1.1", "a proxy's status", "a reset"],
)
async def test_the_log_says_once_why_a_stage_cannot_be_reached(
    served: _Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: tuple[bytes, ...],
    reason: str,
) -> None:
    attempts, connect = 0, Http2Channel._connected

    async def count(channel: Http2Channel) -> Any:
        nonlocal attempts
        attempts += 1
        return await connect(channel)

    monkeypatch.setattr(Http2Channel, "_connected", count)
    monkeypatch.setattr("neuronpipe.rpc.http2.client._MAX_PAUSE_S", 0.01)
    async with _answering(*answers) as target, _following(target, served):
        await happens(lambda: attempts > 5)
    assert caplog.messages == ["a stage cannot be reached"]
    expected = {"rpc": TOKENIZE.path, "address": f"ipv4:{target}", "reason": reason}
    assert caplog.records[0].__dict__["fields"] == expected


async def test_a_connection_that_fails_after_its_caller_gave_up_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with _answering(b"") as target:
        host, _, port = target.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(_ClientConnection, host, int(port))
        await happens(connection.ready.done)
    del connection
    gc.collect()
    assert caplog.messages == []


async def test_a_stage_that_is_lost_again_is_logged_again(served: _Served, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with _following(f"127.0.0.1:{port}", served):
        for count in (1, 2):
            await happens(lambda count=count: _reasons(caplog) == ["Connection refused"] * count)  # type: ignore[misc]
            async with _process(_saying(count), f"127.0.0.1:{port}"):
                assert await served.numbers(1) == [count]


def _reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of stages that cannot be reached; asyncio's own text of a refused connection as uvloop's."""
    return [
        str(record.__dict__["fields"]["reason"]).replace("Connect call failed", "Connection refused").split(" (")[0]
        for record in caplog.records
        if record.message == "a stage cannot be reached"
    ]


class _Unread:
    """The receiver of the streams: leaves each to the test."""

    def __init__(self) -> None:
        self._streams: asyncio.Queue[StageStream] = asyncio.Queue()

    async def __call__(self, stream: StageStream) -> None:
        self._streams.put_nowait(stream)
        await asyncio.Event().wait()

    async def stream(self) -> StageStream:
        return await asyncio.wait_for(self._streams.get(), _LIMIT_S)


@asynccontextmanager
async def _stream(*said: bytes, code: grpc.StatusCode | None = None) -> AsyncIterator[StageStream]:
    """A stream on which a process says so much and then ends it, with or without an error."""

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        for message in (_READY, *said):
            yield message
        if code:
            await context.abort(code, "the secret")

    unread = _Unread()
    async with _process(answer) as target, _following(target, unread):
        yield await unread.stream()


@pytest.mark.parametrize("code", [None, *(code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)], ids=str)
async def test_a_stream_that_has_ended_is_unavailable_for_both_directions(code: grpc.StatusCode | None) -> None:
    async with _stream(_outcome(1), code=code) as stream:
        assert [item_id for item_id, _ in (await stream.receive()).outcomes] == [1]
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"^the stream has ended$"):
                await stream.receive()
            with pytest.raises(Unavailable, match=r"^the stream has ended$"):
                await _send(stream, [(1, _item())], [])


async def test_a_stream_whose_process_dies_is_unavailable_for_both_directions() -> None:
    unread = _Unread()
    async with _process(_saying(1)) as target:
        following = asyncio.create_task(follow_endpoints(TOKENIZE, target, unread))
        stream = await unread.stream()
        await stream.receive()
    with pytest.raises(Unavailable):
        await stream.receive()
    with pytest.raises(Unavailable):
        await _send(stream, [(1, _item())], [])
    await cancelled(following)


async def test_a_response_that_cannot_be_read_ends_the_stream_as_unavailable() -> None:
    async with _stream(_BROKEN, _outcome(1)) as stream:
        with pytest.raises(Unavailable):
            await stream.receive()


async def test_a_process_whose_first_message_cannot_be_read_gets_no_items(served: _Served) -> None:
    opened = 0

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        nonlocal opened
        opened += 1
        yield _BROKEN
        async for _ in requests:
            pass

    async with _process(answer) as target, _following(target, served) as following:
        await happens(lambda: opened > 1)
        assert served.streams.empty()
        assert not following.done()


async def test_a_bug_in_whoever_gets_the_streams_comes_out() -> None:
    async def serve(stream: StageStream) -> None:
        raise RuntimeError("a bug")

    async with _process(_saying(1)) as target:
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(follow_endpoints(TOKENIZE, target, serve), _LIMIT_S)
    assert caught.group_contains(RuntimeError, match="a bug")


async def test_whoever_stops_following_ends_the_streams(served: _Served) -> None:
    left = asyncio.Event()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        try:
            yield _READY
            yield _outcome(1)
            await asyncio.Event().wait()
        finally:
            left.set()

    async with _process(answer) as target:
        async with _following(target, served):
            await served.numbers(1)
        await asyncio.wait_for(left.wait(), _LIMIT_S)


def _announcement(*models: tuple[str, str], max_message_bytes: int = 0) -> bytes:
    announced = [ServedModel(name=name, version=version) for name, version in models]
    return TokenizeResponse(
        announcement=Announcement(models=announced, max_message_bytes=max_message_bytes)
    ).SerializeToString()


@asynccontextmanager
async def _conversation(*said: bytes) -> AsyncIterator[tuple[StageStream, "asyncio.Queue[TokenizeRequest]"]]:
    """A stream on which a process says so much, and what it receives."""
    received: asyncio.Queue[TokenizeRequest] = asyncio.Queue()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        for message in said:
            yield message
        async for request in requests:
            received.put_nowait(request)

    unread = _Unread()
    async with _process(answer) as target, _following(target, unread):
        yield await unread.stream(), received


async def test_a_process_that_announces_nothing_has_no_model() -> None:
    async with _conversation(_READY, _READY) as (stream, _):
        assert stream.models == ProcessModels()
        assert (await stream.receive()).models is None


async def test_the_models_of_the_first_message_and_of_later_ones_are_told() -> None:
    first, second = ModelKey("one", 1), ModelKey("two", 12)
    async with _conversation(
        _announcement(("one", "1"), ("odd", "?")), _announcement(("one", "1"), ("two", "12")), _announcement()
    ) as (stream, _):
        assert stream.models == ProcessModels(frozenset({first}))
        assert (await stream.receive()).models == ProcessModels(frozenset({first, second}))
        assert (await stream.receive()).models == ProcessModels(frozenset())


async def test_connections_that_are_all_to_end_at_once_get_few_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.rpc.endpoints._PAUSE_S", 0.1)
    begun = 0

    async def serve(stream: StageStream) -> None:
        nonlocal begun
        begun += 1
        stream._call.connection.goaway_received.set()  # as of a proxy that ends a connection after its first call
        await stream.retired.wait()

    async with _process(_saying()) as target, _following(target, serve):
        await happens(lambda: begun > 0)
        await asyncio.sleep(0.5)  # nearly nothing happens
        assert begun <= 7


async def test_how_far_models_are_prepared_is_told_in_the_first_message_and_in_later_ones() -> None:
    said = []
    for ready in 40, 41:
        announcement = Announcement()
        for version in "12", "?":
            announcement.prepared.add(
                name="one", version=version, shapes=138, shapes_ready=ready, lone_graphs=3, lone_graph_bytes=1 << 33
            )
        said.append(TokenizeResponse(announcement=announcement).SerializeToString())
    async with _conversation(*said) as (stream, _):
        prepared = {ModelKey("one", 12): Preparation(138, 40, 3, 1 << 33)}
        assert stream.models == ProcessModels(frozenset(), prepared=prepared)
        prepared = {ModelKey("one", 12): Preparation(138, 41, 3, 1 << 33)}
        assert (await stream.receive()).models == ProcessModels(frozenset(), prepared=prepared)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_outcomes_error_is_told_as_its_class(error: NeuronpipeError) -> None:
    said = TokenizeResponse(
        outcomes=[TokenizeOutcome(item_id=1, error=to_status(error)), TokenizeOutcome(item_id=2)]
    ).SerializeToString()
    async with _conversation(_READY, said) as (stream, _):
        (_, told), (_, nothing) = (await stream.receive()).outcomes
    assert type(told) is type(error)
    assert vars(told) == vars(error)
    assert isinstance(nothing, InternalError)


async def test_an_item_larger_than_the_process_takes_is_refused_alone_and_the_others_travel() -> None:
    async with _conversation(_announcement(max_message_bytes=1000)) as (stream, received):
        sending = [(1, _item("a")), (2, _item("b", "x" * 2000)), (3, _item("c"))]
        ((item_id, error),) = await _send(stream, sending, [7])
        sent = [await asyncio.wait_for(received.get(), _LIMIT_S)]
        while sum(len(message.items) for message in sent) < 2:
            sent.append(await asyncio.wait_for(received.get(), _LIMIT_S))
    assert item_id == 2
    assert isinstance(error, InvalidInput)
    # 2,000 bytes of text and the frames around them.
    assert re.fullmatch(r"input: 20\d\d bytes for the tokenizer service, which takes 1000 at most", error.message)
    assert [item.context.item_id for message in sent for item in message.items] == [1, 3]
    assert [item_id for message in sent for item_id in message.abandoned_item_ids] == [7]
    assert all(message.ByteSize() <= 1000 for message in sent)


async def test_an_item_beyond_a_real_servers_limit_does_not_end_the_stream() -> None:
    async def stage(item: items.TokenizeItem) -> items.EncodedInput:
        return items.EncodedInput(NO_TENSORS, tokens=item.input.size_bytes)

    outcomes: asyncio.Queue[list[Outcome]] = asyncio.Queue()

    async def serve(stream: StageStream) -> None:
        refused = await _send(stream, [(1, _item("large", "x" * 20_000)), (2, _item("small", "x"))], [])
        outcomes.put_nowait([*refused, *(await stream.receive()).outcomes])
        await asyncio.Event().wait()

    models = SimpleNamespace(
        announced=ProcessModels(frozenset()),
        changes=Changes(),
        needs=ModelNeeds(),
    )
    method = StageMethod(TOKENIZE, stage, Telemetry(), models=models, max_message_bytes=10_000)

    async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for response in method(requests, context):
            yield TOKENIZE.encode(response)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 10_000)])
    handler: Any = grpc.stream_stream_rpc_method_handler(answer, request_deserializer=TOKENIZE.decode)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKENIZE.service, {"Tokenize": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with _following(f"127.0.0.1:{port}", serve):
        (_, error), (item_id, value) = await asyncio.wait_for(outcomes.get(), _LIMIT_S)
    await server.stop(0)
    assert isinstance(error, InvalidInput)
    assert (item_id, value.tokens) == (2, _input("x").ByteSize())


async def test_items_that_are_too_large_together_travel_in_several_messages() -> None:
    async with _conversation(_announcement(max_message_bytes=1000)) as (stream, received):
        assert await _send(stream, [(item_id, _item("a", "x" * 400)) for item_id in range(1, 6)], [7]) == []
        sent: list[TokenizeRequest] = []
        while sum(len(message.items) for message in sent) < 5:
            sent.append(await asyncio.wait_for(received.get(), _LIMIT_S))
    assert [item.context.item_id for message in sent for item in message.items] == [1, 2, 3, 4, 5]
    assert max(message.ByteSize() for message in sent) <= 1000
    assert sum(list(message.abandoned_item_ids) == [7] for message in sent) == 1


async def test_an_item_that_cannot_be_written_fails_alone() -> None:
    class Broken(Packed[TaskInput]):
        @property
        def data(self) -> bytes:
            raise RuntimeError("the secret")

        @property
        def size_bytes(self) -> int:
            return 5

    broken = items.TokenizeItem(Call("broken"), ModelKey("m", 1), Broken(TaskInput, data=b""))
    late = _item("late", deadline_s=time.monotonic() - 1)
    async with _conversation(_READY) as (stream, received):
        errors = dict(await _send(stream, [(1, late), (2, broken), (3, _item("good"))], []))
        request = await asyncio.wait_for(received.get(), _LIMIT_S)
    assert [item.context.item_id for item in request.items] == [3]
    assert {item_id: type(error) for item_id, error in errors.items()} == {1: DeadlineExceeded, 2: InternalError}
    assert "secret" not in errors[2].message


async def test_an_item_carries_what_is_left_of_its_deadline_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.core.calls.time", SimpleNamespace(monotonic=lambda: 1002.0))
    async with _conversation(_READY) as (stream, received):
        await _send(stream, [(1, _item(deadline_s=1005.0)), (2, _item())], [])
        request = await received.get()
    assert [item.context.remaining_ns for item in request.items] == [3_000_000_000, 0]


@pytest.mark.parametrize("is_large", [True, False])
async def test_large_items_are_written_in_a_thread(is_large: bool) -> None:
    threads: list[threading.Thread] = []

    class Noted(Packed[TaskInput]):
        @property
        def data(self) -> bytes:
            threads.append(threading.current_thread())
            return super().data

        @property
        def size_bytes(self) -> int:
            return len(super().data)

    item = items.TokenizeItem(
        Call(), ModelKey("m", 1), Noted(TaskInput, message=_input("x" * (300 << 10 if is_large else 100)))
    )
    async with _conversation(_READY) as (stream, _):
        assert await _send(stream, [(1, item)], []) == []
    assert (threads[0] is threading.main_thread()) == (not is_large)


@pytest.mark.parametrize(
    ("code", "level"),
    [
        (None, logging.INFO),
        (grpc.StatusCode.UNAVAILABLE, logging.INFO),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, logging.WARNING),
    ],
    ids=str,
)
async def test_a_stream_that_ends_is_logged_with_its_code_and_reason(
    served: _Served, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode | None, level: int
) -> None:
    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        yield _outcome(1)
        if code:
            await context.abort(code, "larger than max (5 vs. 4)")

    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        async with _process(answer) as target, _following(target, served):
            await served.numbers(2)
    assert caplog.messages[0] == "a stage's stream is open"
    record = caplog.records[1]
    assert (record.message, record.levelno) == ("a stage's stream has ended", level)
    name, reason = (code.name, "larger than max (5 vs. 4)") if code else ("OK", "")
    expected = {"rpc": TOKENIZE.path, "address": f"ipv4:{target}", "code": name, "reason": reason}
    assert record.__dict__["fields"] == expected
