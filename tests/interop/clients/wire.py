"""gRPC over HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), as far as a client that speaks HTTP only must know it."""

import base64
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from tests.interop.clients.lines import CallRecord, metadata_of, requests_of


def fields_of(call: dict[str, Any]) -> list[tuple[str, str]]:
    """The header fields of a call."""
    fields = [("te", "trailers"), ("content-type", "application/grpc")]
    if call["timeout_ms"]:
        fields.append(("grpc-timeout", f"{call['timeout_ms']}m"))
    return fields + [
        (key, value if isinstance(value, str) else base64.b64encode(value).decode()) for key, value in metadata_of(call)
    ]


def body_of(call: dict[str, Any]) -> bytes:
    """The messages of a call."""
    requests = requests_of(call)
    return b"".join(
        requests if call["is_raw"] else [b"\0" + len(request).to_bytes(4, "big") + request for request in requests]
    )


def read_response(record: CallRecord, status: str, fields: Sequence[tuple[str, str]], body: bytes) -> CallRecord:
    """What a response means. `status`: HTTP's. `fields`: of the head, and the trailers behind them."""
    place = 0
    while place + 5 <= len(body):
        end = place + 5 + int.from_bytes(body[place + 1 : place + 5], "big")
        record.received(body[place + 5 : end])
        place = end
    code = dict(fields).get("grpc-status")
    if code is None or place != len(body):
        return record.ended(2, f"HTTP {status}, grpc-status {code}, {len(body) - place} bytes left over", fields)
    return record.ended(
        int(code),
        unquote(dict(fields).get("grpc-message", "")),
        [(key, base64.b64decode(value + "==") if key.endswith("-bin") else value) for key, value in fields],
    )
