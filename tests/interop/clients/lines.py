"""The lines that the clients in Python read and write."""

import base64
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.echo_server import pattern

# What a client writes of a response, if it is no larger.
_SMALL_BYTES = 16_384


@dataclass
class CallRecord:
    """A call, as it goes."""

    began_s: float = field(default_factory=time.monotonic)
    status: int = 2
    message: str = ""
    trailing: Sequence[tuple[str, str | bytes]] = ()
    responses: list[tuple[int, int, bytes]] = field(default_factory=list)
    seconds: float = 0.0

    def received(self, data: bytes) -> None:
        """A response has come."""
        self.responses.append((len(data), zlib.crc32(data), data if len(data) <= _SMALL_BYTES else b""))

    def ended(self, status: int, message: str | None, trailing: Iterable[Any] | None) -> "CallRecord":
        """The call is over."""
        self.seconds = time.monotonic() - self.began_s
        self.status, self.message = status, message or ""
        self.trailing = [(key, value) for key, value in trailing or ()]
        return self


def requests_of(call: dict[str, Any]) -> list[bytes]:
    """A call's messages."""
    return [pattern(request) if isinstance(request, int) else base64.b64decode(request) for request in call["requests"]]


def metadata_of(call: dict[str, Any]) -> list[tuple[str, str | bytes]]:
    """A call's metadata."""
    return [(key, base64.b64decode(value) if key.endswith("-bin") else value) for key, value in call["metadata"]]


def tls_of(case: dict[str, Any]) -> dict[str, bytes] | None:
    """The contents of the files: "ca", and where the client shows a certificate, "certificate" and "key"."""
    return case["tls"] and {name: Path(path).read_bytes() for name, path in case["tls"].items()}


def outcome_of(calls: Sequence[CallRecord]) -> dict[str, Any]:
    """The JSON of the calls that one description stands for."""
    first = calls[0]
    worst = next((call for call in calls if call.status), first)
    return {
        "statuses": {str(status): count for status, count in Counter(call.status for call in calls).items()},
        "message": worst.message,
        "trailing": [
            [key, base64.b64encode(value).decode() if isinstance(value, bytes) else value]
            for key, value in worst.trailing
        ],
        "responses": [[size, checksum, base64.b64encode(data).decode()] for size, checksum, data in first.responses],
        "distinct": len({tuple(response[:2] for response in call.responses) for call in calls}),
        "seconds": max(call.seconds for call in calls),
    }


def serve_lines(run: Callable[[dict[str, Any]], Sequence[Sequence[CallRecord]]]) -> None:
    """Runs each case that comes, until the input ends."""
    for line in sys.stdin:
        outcomes = [outcome_of(calls) for calls in run(json.loads(line))]
        print(json.dumps({"outcomes": outcomes}), flush=True)
