"""Runs cases with grpcio's asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc

from tests.interop.clients.grpcio_sync import compression_of, credentials_of, method_of, options_of
from tests.interop.clients.lines import CallRecord, metadata_of, requests_of, serve_lines


def _channel(case: dict[str, Any]) -> grpc.aio.Channel:
    options, compression, credentials = options_of(case), compression_of(case), credentials_of(case)
    if credentials:
        return grpc.aio.secure_channel(case["target"], credentials, options, compression)
    return grpc.aio.insecure_channel(case["target"], options, compression)


async def _requests(call: dict[str, Any]) -> AsyncIterator[bytes]:
    for number, request in enumerate(requests_of(call)):
        if number and call["send_pause_ms"]:
            await asyncio.sleep(call["send_pause_ms"] / 1000)
        yield request


async def _call_once(channel: grpc.aio.Channel, call: dict[str, Any]) -> CallRecord:
    record = CallRecord()
    given: dict[str, Any] = {"timeout": call["timeout_ms"] / 1000 or None, "metadata": metadata_of(call)}
    client_streams, server_streams = call["kind"] in ("client", "bidi"), call["kind"] in ("server", "bidi")
    running = method_of(channel, call)(_requests(call) if client_streams else requests_of(call)[0], **given)
    timer = None
    if call["cancel_after_ms"]:
        timer = asyncio.get_running_loop().call_later(call["cancel_after_ms"] / 1000, running.cancel)
    with suppress(grpc.RpcError, asyncio.CancelledError):
        if server_streams:
            async for data in running:
                record.received(data)
                if call["read_pause_ms"]:
                    await asyncio.sleep(call["read_pause_ms"] / 1000)
                if len(record.responses) == call["cancel_after"]:
                    running.cancel()
        else:
            record.received(await running)
    if timer:
        timer.cancel()
    return record.ended((await running.code()).value[0], await running.details(), await running.trailing_metadata())


async def _caller(channel: grpc.aio.Channel, call: dict[str, Any]) -> list[CallRecord]:
    await asyncio.sleep(call["start_ms"] / 1000)
    ends_s = time.monotonic() + call["for_ms"] / 1000
    calls = [await _call_once(channel, call)]
    while time.monotonic() < ends_s:
        calls.append(await _call_once(channel, call))
    return calls


async def _run(case: dict[str, Any]) -> Sequence[Sequence[CallRecord]]:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(case)) for _ in range(case["connections"])]
        ended = await asyncio.gather(
            *(
                asyncio.gather(*(_caller(channels[number % len(channels)], call) for number in range(call["repeat"])))
                for call in case["calls"]
            )
        )
    return [[record for caller in callers for record in caller] for callers in ended]


if __name__ == "__main__":
    serve_lines(lambda case: asyncio.run(_run(case)))
