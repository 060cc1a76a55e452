"""rpc/endpoints.py over real connections: a stream to every process behind a target, opened again whenever it is lost.

The processes are written by hand and send bytes, so that they can also send what no service of ours does.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from neuronpipe.api.v1.stages_pb2 import ItemContext, TokenizeItem, TokenizeOutcome, TokenizeRequest, TokenizeResponse
from neuronpipe.core.errors import Unavailable
from neuronpipe.rpc.endpoints import StageStream, follow_endpoints, resolve
from neuronpipe.rpc.items import TOKENIZE

_LIMIT_S = 10
# An empty message: the sign that a service takes items.
_READY = b""
# A message that says to be five bytes long, with one.
_BROKEN = b"\x0a\x05a"

_Requests: TypeAlias = AsyncIterator[TokenizeRequest]
_Answer: TypeAlias = Callable[[_Requests, Any], AsyncIterator[bytes]]


@asynccontextmanager
async def _process(answer: _Answer, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """A process that answers each stream so; gives its target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler: Any = grpc.stream_stream_rpc_method_handler(answer, request_deserializer=TokenizeRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKENIZE.service.full_name, {"Tokenize": handler}),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _saying(number: int) -> _Answer:
    """Says its number, and then nothing until the stream ends."""

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        yield _outcome(number)
        async for _ in requests:
            pass

    return answer


def _outcome(item_id: int) -> bytes:
    return TokenizeResponse(outcomes=[TokenizeOutcome(item_id=item_id)]).SerializeToString()


class _Served:
    """Whoever gets the streams: keeps each until it is lost."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[StageStream] = asyncio.Queue()
        self.received: asyncio.Queue[int] = asyncio.Queue()
        self.lost = 0

    async def __call__(self, stream: StageStream) -> None:
        self.streams.put_nowait(stream)
        try:
            while True:
                for outcome in (await stream.receive())[0]:
                    self.received.put_nowait(outcome.item_id)
        except Unavailable:
            return
        finally:
            self.lost += 1

    async def numbers(self, count: int) -> list[int]:
        """The next numbers that processes said."""
        return sorted([await asyncio.wait_for(self.received.get(), _LIMIT_S) for _ in range(count)])


@asynccontextmanager
async def _following(target: str, serve: Callable[[StageStream], Awaitable[None]]) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(follow_endpoints(TOKENIZE, target, serve))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


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
    outcomes: asyncio.Queue[list[TokenizeOutcome]] = asyncio.Queue()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        async for request in requests:
            received.put_nowait(request)
            yield b""
            yield _outcome(5)

    async def serve(stream: StageStream) -> None:
        await stream.send([TokenizeItem(context=ItemContext(item_id=5))], [3, 4])
        outcomes.put_nowait(list((await stream.receive())[0]))
        outcomes.put_nowait(list((await stream.receive())[0]))
        await asyncio.Event().wait()

    async with _process(answer) as target, _following(target, serve):
        request = await asyncio.wait_for(received.get(), _LIMIT_S)
        assert request == TokenizeRequest(items=[TokenizeItem(context=ItemContext(item_id=5))], abandoned_item_ids=[3, 4])
        assert [await asyncio.wait_for(outcomes.get(), _LIMIT_S) for _ in range(2)] == [[], [TokenizeOutcome(item_id=5)]]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED], ids=lambda code: code.name)
async def test_a_process_that_is_starting_or_stopping_is_asked_again_without_a_word_until_it_serves(
    served: _Served, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    refusals = 0

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        nonlocal refusals
        if refusals < 3:
            refusals += 1
            await context.abort(code, "the tokenizer service is starting")
        yield _READY
        yield _outcome(1)

    async with _process(answer) as target, _following(target, served):
        assert await served.numbers(1) == [1]
    assert refusals == 3
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
    assert await resolve(target) == (expected, True)


class _Names:
    """Stands in for the resolver: what a name's addresses are, until the test says otherwise."""

    def __init__(self, *ports: int) -> None:
        self.ports: tuple[int, ...] | None = ports
        self.asked = 0

    async def getaddrinfo(self, host: str, port: str, **options: Any) -> list[Any]:
        assert (host, port) == ("tokenizer.example", "80")
        self.asked += 1
        if self.ports is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in self.ports]


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
        await _until(lambda: names.asked > 1)
        names.ports = (_port(target),)
        assert await served.numbers(1) == [1]
    record = caplog.records[0]
    assert record.message == "a target cannot be resolved"
    assert record.__dict__["fields"] == {"target": _NAME, "problem": "Name or service not known"}


async def test_a_name_that_cannot_be_resolved_leaves_the_other_targets_alone(served: _Served, names: _Names, tmp_path: Path) -> None:
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


async def test_an_address_that_a_name_loses_is_dropped_and_the_others_are_not(served: _Served, names: _Names) -> None:
    left: list[int] = []

    def leaving(number: int) -> _Answer:
        async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
            try:
                yield _READY
                yield _outcome(number)
                await asyncio.Event().wait()
            finally:
                left.append(number)

        return answer

    async with _process(leaving(1)) as first, _process(leaving(2)) as second:
        names.ports = (_port(first), _port(second))
        async with _following(_NAME, served):
            assert await served.numbers(2) == [1, 2]
            names.ports = (_port(second),)
            await _until(lambda: left == [1])
            asked = names.asked
            await _until(lambda: names.asked > asked + 2)
            assert (left, served.lost) == ([1], 1)


async def test_addresses_stay_while_a_name_cannot_be_resolved(served: _Served, names: _Names) -> None:
    async with _process(_saying(1)) as target:
        names.ports = (_port(target),)
        async with _following(_NAME, served):
            assert await served.numbers(1) == [1]
            names.ports = None
            asked = names.asked
            await _until(lambda: names.asked > asked + 2)
            assert served.lost == 0


async def test_addresses_of_a_name_stay_while_it_alone_cannot_be_resolved(served: _Served, names: _Names, tmp_path: Path) -> None:
    async with _process(_saying(1)) as first, _process(_saying(2), f"unix:{tmp_path}/socket") as second:
        names.ports = (_port(first),)
        async with _following(f"{_NAME},{second}", served):
            assert await served.numbers(2) == [1, 2]
            names.ports = None
            asked = names.asked
            await _until(lambda: names.asked > asked + 2)
            assert served.lost == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_process_that_refuses_otherwise_is_logged_and_asked_again(
    served: _Served, caplog: pytest.LogCaptureFixture, code: grpc.StatusCode
) -> None:
    refusals = 0

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            await context.abort(code, "the secret")
        yield _READY
        yield _outcome(1)
        async for _ in requests:
            pass

    async with _process(answer) as target, _following(target, served):
        assert await served.numbers(1) == [1]
    assert [record.message for record in caplog.records] == ["a stage refuses its stream"] * 2
    assert caplog.records[0].__dict__["fields"] == {
        "rpc": "/neuronpipe.api.v1.TokenizerService/Tokenize",
        "address": f"ipv4:{target}",
        "code": code.name,
    }


@asynccontextmanager
async def _stream(*said: bytes, code: grpc.StatusCode | None = None) -> AsyncIterator[StageStream]:
    """A stream on which a process says so much and then ends it, with or without an error."""
    streams: asyncio.Queue[StageStream] = asyncio.Queue()

    async def answer(requests: _Requests, context: Any) -> AsyncIterator[bytes]:
        yield _READY
        for one in said:
            yield one
        if code:
            await context.abort(code, "the secret")

    async def serve(stream: StageStream) -> None:
        streams.put_nowait(stream)
        await asyncio.Event().wait()

    async with _process(answer) as target, _following(target, serve):
        yield await asyncio.wait_for(streams.get(), _LIMIT_S)


@pytest.mark.parametrize("code", [None, *(code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)], ids=str)
async def test_a_stream_that_has_ended_is_unavailable_for_both_directions(code: grpc.StatusCode | None) -> None:
    async with _stream(_outcome(1), code=code) as stream:
        assert [outcome.item_id for outcome in (await stream.receive())[0]] == [1]
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"^the stream has ended$"):
                await stream.receive()
            with pytest.raises(Unavailable, match=r"^the stream has ended$"):
                await stream.send([TokenizeItem()], [])


async def test_a_stream_whose_process_dies_is_unavailable_for_both_directions() -> None:
    streams: asyncio.Queue[StageStream] = asyncio.Queue()

    async def serve(stream: StageStream) -> None:
        streams.put_nowait(stream)
        await asyncio.Event().wait()

    async with _process(_saying(1)) as target:
        following = asyncio.create_task(follow_endpoints(TOKENIZE, target, serve))
        stream = await asyncio.wait_for(streams.get(), _LIMIT_S)
        await stream.receive()
    with pytest.raises(Unavailable):
        await stream.receive()
    with pytest.raises(Unavailable):
        await stream.send([TokenizeItem()], [])
    following.cancel()
    await asyncio.wait([following])


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
        await _until(lambda: opened > 1)
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
