"""The clients of the closed loop: real servers answer them, and what they count is so."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.bench.light_clients import Calls, run_arrivals, run_grpc, run_http

_PATH = "/bench.Echo/Call"
_REQUESTS = [bytes([number]) * (number + 1) for number in range(200)]


@asynccontextmanager
async def _serving(answer: Any, **options: int) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[(f"grpc.{name}", value) for name, value in options.items()])
    service, method = _PATH.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _echo(message: bytes, context: Any) -> bytes:
    return message


@pytest.mark.parametrize("callers", [1, 16])
async def test_each_request_gets_its_answer(callers: int) -> None:
    async with _serving(_echo) as target:
        calls = Calls(iter(_REQUESTS), callers)
        await run_grpc(calls, callers, target, _PATH, b"")
    assert calls.count == len(_REQUESTS)
    assert sorted(answer for _, answer in calls.answered) == _REQUESTS
    assert all(duration_s > 0 for duration_s, _ in calls.answered)


async def test_answers_may_be_larger_than_any_window() -> None:
    # 64 KiB is the first window of a connection, and 16 KiB a frame; the client gives new room after each MiB.
    async def answer(message: bytes, context: Any) -> bytes:
        return message * 30_000

    requests = [bytes([number]) * 100 for number in range(20)]
    async with _serving(answer) as target:
        calls = Calls(iter(requests), 4)
        await run_grpc(calls, 4, target, _PATH, b"")
    assert sorted(data[:1] for _, data in calls.answered) == [request[:1] for request in requests]
    assert {len(data) for _, data in calls.answered} == {3_000_000}


async def test_requests_beyond_the_window_wait_for_it() -> None:
    # Together 3 MB, where a server first takes 64 KiB.
    requests = [bytes([number]) * 60_000 for number in range(50)]
    async with _serving(_echo) as target:
        calls = Calls(iter(requests), 50)
        await run_grpc(calls, 50, target, _PATH, b"")
    assert sorted(answer for _, answer in calls.answered) == requests


async def test_a_call_that_fails_is_an_error_and_its_caller_goes_on() -> None:
    numbers = itertools.count()

    async def answer(message: bytes, context: Any) -> bytes:
        if next(numbers) % 2:
            # Each message is new to the table of headers, so that no block is met twice.
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full {next(numbers)}")
        return message

    async with _serving(answer) as target:
        calls = Calls(iter(_REQUESTS), 1)
        await run_grpc(calls, 1, target, _PATH, b"")
    assert calls.errors + len(calls.answered) == len(_REQUESTS)
    assert calls.errors > len(_REQUESTS) / 4
    assert calls.failure.startswith("full ")


async def test_what_ends_outside_of_the_time_does_not_count() -> None:
    async with _serving(_echo) as target:
        calls = Calls(iter(_REQUESTS), 1, began_s=float("inf"))
        await run_grpc(calls, 1, target, _PATH, b"")
    assert (calls.count, calls.answered) == (len(_REQUESTS), [])


async def test_a_server_that_ends_the_connection_breaks_the_loop_off() -> None:
    async with _serving(_echo, max_connection_age_ms=100, max_connection_age_grace_ms=100) as target:
        calls = Calls(itertools.cycle(_REQUESTS), 1)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(run_grpc(calls, 1, target, _PATH, b""), 30)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_http_answers_are_read_whole_and_other_statuses_are_errors(is_chunked: bool) -> None:
    def framed(body: bytes) -> bytes:
        if not is_chunked:
            return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        parts = [body[at : at + 50] for at in range(0, len(body), 50)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunks

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /predict HTTP/1.1\r\n")
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2]))
            status = b"503 no" if body == _REQUESTS[0] else b"200 OK"
            answer = b"HTTP/1.1 %b\r\n%b" % (status, framed(body))
            # In two pieces, cut anywhere.
            for part in (answer[: 20 + len(body)], answer[20 + len(body) :]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

    async def serve_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)

    server = await asyncio.start_server(serve_until_closed, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    calls = Calls(iter(_REQUESTS), 4)
    await run_http(calls, 4, f"127.0.0.1:{port}", "/predict")
    server.close()
    assert sorted(answer for _, answer in calls.answered) == _REQUESTS[1:]
    assert calls.errors == 1


async def test_arrivals_are_sent_when_they_are_due_and_given_up_at_their_deadline() -> None:
    cancelled = 0

    async def answer(message: bytes, context: Any) -> bytes:
        nonlocal cancelled
        if message == b"refused":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if message == b"slow":
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return message

    kinds = [b"quick", b"slow", b"refused"]
    arrivals_s = iter([number / 100 for number in range(60)])
    async with _serving(answer) as target:
        calls, lags_s = await run_arrivals(arrivals_s, itertools.cycle(kinds), 2.0, target, _PATH)
    assert (calls.count, calls.failed, len(lags_s)) == (60, 20, 60)
    assert [data for _, data in calls.answered] == [b"quick"] * 20
    assert min(lags_s) >= 0
    assert cancelled == 20
