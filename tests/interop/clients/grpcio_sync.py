"""Runs cases with grpcio, and a thread for each call."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tests.interop.clients.lines import CallRecord, metadata_of, requests_of, serve_lines, tls_of


def options_of(case: dict[str, Any]) -> list[tuple[str, int]]:
    """The options of a channel: no limit, no retry policy, and a connection of its own."""
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", int(case["repeats"])),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_metadata_size", 1 << 20),
    ]
    if case["keepalive_ms"]:
        options += [("grpc.keepalive_time_ms", case["keepalive_ms"]), ("grpc.http2.max_pings_without_data", 0)]
    return options


def credentials_of(case: dict[str, Any]) -> "grpc.ChannelCredentials | None":
    """Those of TLS; None without."""
    tls = tls_of(case)
    return grpc.ssl_channel_credentials(tls["ca"], tls.get("key"), tls.get("certificate")) if tls else None


def compression_of(case: dict[str, Any]) -> grpc.Compression:
    """Of what the client sends."""
    return grpc.Compression.Gzip if case["gzip"] else grpc.Compression.NoCompression


def method_of(channel: "grpc.Channel | grpc.aio.Channel", call: dict[str, Any]) -> Any:
    """The function that calls the method."""
    kinds = {"unary": "unary_unary", "server": "unary_stream", "client": "stream_unary", "bidi": "stream_stream"}
    return getattr(channel, kinds[call["kind"]])(call["path"])


def _channel(case: dict[str, Any]) -> grpc.Channel:
    options, compression, credentials = options_of(case), compression_of(case), credentials_of(case)
    if credentials:
        return grpc.secure_channel(case["target"], credentials, options, compression)
    return grpc.insecure_channel(case["target"], options, compression)


def _requests(call: dict[str, Any]) -> Iterator[bytes]:
    for number, request in enumerate(requests_of(call)):
        if number and call["send_pause_ms"]:
            time.sleep(call["send_pause_ms"] / 1000)
        yield request


def _call_once(channel: grpc.Channel, call: dict[str, Any]) -> CallRecord:
    record = CallRecord()
    given: dict[str, Any] = {"timeout": call["timeout_ms"] / 1000 or None, "metadata": metadata_of(call)}
    client_streams, server_streams = call["kind"] in ("client", "bidi"), call["kind"] in ("server", "bidi")
    method = method_of(channel, call)
    start = method if server_streams else method.future
    running = start(_requests(call) if client_streams else requests_of(call)[0], **given)
    timer = threading.Timer(call["cancel_after_ms"] / 1000, running.cancel) if call["cancel_after_ms"] else None
    if timer:
        timer.start()
    try:
        for data in running if server_streams else [running.result()]:
            record.received(data)
            if call["read_pause_ms"]:
                time.sleep(call["read_pause_ms"] / 1000)
            if len(record.responses) == call["cancel_after"]:
                running.cancel()
    except (grpc.RpcError, grpc.FutureCancelledError):
        pass
    return record.ended(running.code().value[0], running.details(), running.trailing_metadata())


def _caller(channel: grpc.Channel, call: dict[str, Any]) -> list[CallRecord]:
    time.sleep(call["start_ms"] / 1000)
    ends_s = time.monotonic() + call["for_ms"] / 1000
    calls = [_call_once(channel, call)]
    while time.monotonic() < ends_s:
        calls.append(_call_once(channel, call))
    return calls


def _run(case: dict[str, Any]) -> Sequence[Sequence[CallRecord]]:
    channels = [_channel(case) for _ in range(case["connections"])]
    with ThreadPoolExecutor(sum(call["repeat"] for call in case["calls"])) as threads:
        callers = [
            [threads.submit(_caller, channels[number % len(channels)], call) for number in range(call["repeat"])]
            for call in case["calls"]
        ]
        ended = [[record for caller in of_call for record in caller.result()] for of_call in callers]
    for channel in channels:
        channel.close()
    return ended


if __name__ == "__main__":
    serve_lines(_run)
