"""Runs cases by frames of HTTP/2, one call after the other."""

from collections.abc import Sequence
from typing import Any

import h2.events

from tests.callers.raw_http2 import RawHttp2
from tests.interop.clients.lines import CallRecord, serve_lines
from tests.interop.clients.wire import body_of, fields_of, read_response


def _call_once(client: RawHttp2, call: dict[str, Any]) -> CallRecord:
    record = CallRecord()
    stream = client.open_call(call["path"], *fields_of(call)[2:])
    client.send_data(stream, body_of(call))
    fields: list[tuple[str, str]] = []
    body = b""
    for event in client.events(lambda event: _ends(event, stream)):
        if getattr(event, "stream_id", None) != stream:
            continue
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            fields += [(str(key), str(value)) for key, value in event.headers or ()]
        elif isinstance(event, h2.events.DataReceived):
            body += event.data
    return read_response(record, dict(fields).get(":status", "none"), fields, body)


def _ends(event: h2.events.Event, stream: int) -> bool:
    return getattr(event, "stream_id", None) == stream and isinstance(
        event, h2.events.StreamEnded | h2.events.StreamReset
    )


def _run(case: dict[str, Any]) -> Sequence[Sequence[CallRecord]]:
    with RawHttp2(case["target"]) as client:
        return [[_call_once(client, call) for _ in range(call["repeat"])] for call in case["calls"]]


if __name__ == "__main__":
    serve_lines(_run)
