"""The light senders of the load generator: real servers answer them, and what they count is so."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.measure.load.generator import OUTCOMES, LoadGenerator, LoadPart, Rows, Sender
from tests.bench.light_clients import GrpcConnection, HttpSender
from tests.bench.load import KeptAnswers
from tests.suite.waiting import happens

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


async def _run(
    sender: Sender, requests: Iterable[bytes], callers: int = 1, **changes: Any
) -> tuple[list[tuple[float, bytes]], Rows]:
    """Durations and answers, and a row for each request."""
    load = {
        "callers": callers, "rate_per_s": None, "seed": (0,), "max_in_flight": 1000, "warm_up_s": 0.0,
        "duration_s": 3600.0, "deadline_s": None, "drain_s": 30.0, "pause_s": 0.001,
    }  # fmt: skip
    began_s, whole = time.monotonic(), LoadPart(**{**load, **changes})
    recorder = KeptAnswers(began_s + whole.warm_up_s)
    await LoadGenerator(sender, iter(requests), whole, began_s, recorder).run()
    answered = [(answer.latency_s, answer.data) for answer in recorder.answers]
    return answered, recorder.rows()


def _count(rows: Rows, outcome: str) -> int:
    return int((rows["outcome"] == OUTCOMES.index(outcome)).sum())


@pytest.mark.parametrize("callers", [1, 16])
async def test_each_request_gets_its_answer(callers: int) -> None:
    async with _serving(_echo) as target:
        answered, rows = await _run(await GrpcConnection.open(target, _PATH), _REQUESTS, callers)
    assert len(rows) == len(_REQUESTS)
    assert sorted(answer for _, answer in answered) == _REQUESTS
    assert all(duration_s > 0 for duration_s, _ in answered)


async def test_answers_may_be_larger_than_any_window() -> None:
    # 64 KiB is the first window of a connection, and 16 KiB a frame; the client gives new room after each MiB.
    async def answer(message: bytes, context: Any) -> bytes:
        return message * 30_000

    requests = [bytes([number]) * 100 for number in range(20)]
    async with _serving(answer) as target:
        answered, _ = await _run(await GrpcConnection.open(target, _PATH), requests, 4)
    assert sorted(data[:1] for _, data in answered) == [request[:1] for request in requests]
    assert {len(data) for _, data in answered} == {3_000_000}


async def test_requests_beyond_the_window_wait_for_it() -> None:
    # Together 3 MB, where a server first takes 64 KiB.
    requests = [bytes([number]) * 60_000 for number in range(50)]
    async with _serving(_echo) as target:
        answered, _ = await _run(await GrpcConnection.open(target, _PATH), requests, 50)
    assert sorted(answer for _, answer in answered) == requests


async def test_a_call_that_fails_is_an_error_and_its_caller_goes_on() -> None:
    numbers = itertools.count()

    async def answer(message: bytes, context: Any) -> bytes:
        if next(numbers) % 2:
            # Each message is new to the table of headers, so that no block is met twice.
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full {next(numbers)}")
        return message

    async with _serving(answer) as target:
        connection = await GrpcConnection.open(target, _PATH)
        answered, rows = await _run(connection, _REQUESTS)
    errors = _count(rows, Overloaded.reason)
    assert errors + len(answered) == len(_REQUESTS)
    assert errors > len(_REQUESTS) / 4
    assert connection.failure.startswith("full ")


async def test_what_ends_outside_of_the_time_does_not_count() -> None:
    async with _serving(_echo) as target:
        _, rows = await _run(await GrpcConnection.open(target, _PATH), _REQUESTS, warm_up_s=3600.0)
    assert len(rows) == len(_REQUESTS)
    assert (rows["due_s"] + rows["latency_s"]).max() < 0


async def test_a_server_that_ends_the_connection_breaks_the_loop_off() -> None:
    async with _serving(_echo, max_connection_age_ms=100, max_connection_age_grace_ms=100) as target:
        connection = await GrpcConnection.open(target, _PATH)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(_run(connection, itertools.cycle(_REQUESTS)), 30)


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
    sender = await HttpSender.open(f"127.0.0.1:{port}", "/predict", 4)
    answered, rows = await _run(sender, _REQUESTS, 4)
    server.close()
    assert sorted(answer for _, answer in answered) == _REQUESTS[1:]
    assert len(rows) - len(answered) == 1
    assert sender.failure.startswith("HTTP/1.1 503 no")


async def test_a_connection_that_the_server_closes_after_an_answer_is_opened_again() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for header in (b"", b"Connection: close\r\n"):
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2]))
                writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (header, len(body), body))
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sender = await HttpSender.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/predict", 2)
    answered, rows = await _run(sender, _REQUESTS, 2)
    server.close()
    assert sorted(answer for _, answer in answered) == sorted(_REQUESTS)
    assert len(rows) == len(_REQUESTS)
    assert connections >= len(_REQUESTS) / 2


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
    async with _serving(answer) as target:
        connection = await GrpcConnection.open(target, _PATH, limit_s=2.0)
        # 60 are expected, with a standard deviation of 8.
        answered, rows = await _run(
            connection, itertools.cycle(kinds), rate_per_s=100.0, duration_s=0.6, deadline_s=2.0, drain_s=20.0
        )
        # Each kind in turn.
        quick, slow, refused = (len(range(place, len(rows), 3)) for place in range(3))
        await happens(lambda: cancelled >= slow)  # the server hears of it a little later
    assert len(rows) > 20
    assert _count(rows, Overloaded.reason) == refused
    assert _count(rows, DeadlineExceeded.reason) == slow
    assert cancelled == slow
    assert [data for _, data in answered] == [b"quick"] * quick
    assert rows["lag_s"].min() >= 0
