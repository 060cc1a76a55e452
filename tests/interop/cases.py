"""Every case of the interop table, declared once: what a client does, and what must come of it.

A client is a program that reads cases as JSON, one a line, does what they say with its own gRPC library, and writes an
outcome as JSON, one a line. So no client knows a case.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferBatchResponse,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.core import errors
from neuronpipe.core.status import CODES, from_status
from tests.callers.requests import classify
from tests.interop import frames
from tests.interop.echo_server import METHODS, SERVICE, pattern

_KINDS = {(False, False): "unary", (False, True): "server", (True, False): "client", (True, True): "bidi"}
_MIB = 1 << 20
_MAX_MESSAGE_BYTES = 64 * _MIB
_OK, _CANCELLED, _DEADLINE, _RESOURCE_EXHAUSTED = 0, 1, 4, 8
_INFERENCE = "/neuronpipe.api.v1.InferenceService"
_INTERNAL, _UNIMPLEMENTED = 13, 12


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of one method.

    `requests`: a size stands for so many bytes of the pattern. `cancel_after`: so many responses. `repeat`: so many
    callers at once, each of which calls once, or again and again for `for_ms`. `is_raw`: requests are sent without the
    five bytes of a message before them.
    """

    path: str
    kind: str
    requests: tuple[int | bytes, ...] = (b"",)
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_ms: int = 0
    start_ms: int = 0
    cancel_after_ms: int = 0
    cancel_after: int = 0
    send_pause_ms: int = 0
    read_pause_ms: int = 0
    repeat: int = 1
    for_ms: int = 0
    is_raw: bool = False

    def as_json(self) -> dict[str, Any]:
        """What a client reads."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["requests"] = [
            request if isinstance(request, int) else base64.b64encode(request).decode() for request in self.requests
        ]
        values["metadata"] = [
            [key, value if isinstance(value, str) else base64.b64encode(value).decode()] for key, value in self.metadata
        ]
        return values


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of the calls that one Call stands for.

    `statuses`: by gRPC's code, how many. The rest is the first call's: `responses` with their sizes, checksums and, if
    they are small, themselves. `distinct`: how many different lists of responses there were.
    """

    statuses: dict[int, int]
    message: str
    trailing: dict[str, str | bytes]
    responses: list[tuple[int, int, bytes]]
    distinct: int
    seconds: float

    @classmethod
    def of(cls, outcome: Mapping[str, Any]) -> "Ended":
        """Of a client's JSON."""
        return cls(
            {int(code): count for code, count in outcome["statuses"].items()},
            outcome["message"],
            {
                key: base64.b64decode(value + "=" * (-len(value) % 4)) if key.endswith("-bin") else value
                for key, value in outcome["trailing"]
            },
            [(size, checksum, base64.b64decode(data)) for size, checksum, data in outcome["responses"]],
            outcome["distinct"],
            outcome["seconds"],
        )

    @property
    def datas(self) -> list[bytes]:
        """The responses themselves, of small ones."""
        return [data for _, _, data in self.responses]


# Raises AssertionError.
Check = Callable[[Ended], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`checks`: of each call in turn. `seen`: by how much the server's own counts grow. `needs`: what a client must be
    able to do. `server`: "echo" or "gateway". `channel`: options of the client's channel.
    """

    name: str
    calls: tuple[Call, ...]
    checks: tuple[Check, ...]
    needs: frozenset[str] = frozenset()
    seen: Mapping[str, int] = field(default_factory=dict)
    server: str = "echo"
    connections: int = 1
    keepalive_ms: int = 0
    gzip: bool = False
    # gRPC's own repeats of calls that no server has seen, which grpcio can turn off, and other clients cannot.
    repeats: bool = False
    # Of the server's memory, while the case runs.
    max_growth_mib: int = 0
    plain_only: bool = False

    def as_json(self, target: str, tls: Mapping[str, Path] | None) -> str:
        """The line that a client reads."""
        return json.dumps(
            {
                "case": self.name,
                "target": target,
                "tls": tls and {name: str(path) for name, path in tls.items()},
                "connections": self.connections,
                "keepalive_ms": self.keepalive_ms,
                "gzip": self.gzip,
                "repeats": self.repeats,
                "calls": [call.as_json() for call in self.calls],
            }
        )


def _echo(method: str, *requests: int | bytes, **fields: Any) -> Call:
    return Call(f"/{SERVICE}/{method}", _KINDS[METHODS[method]], requests, **fields)


def _told(method: str, told: Mapping[str, Any], **fields: Any) -> Call:
    return _echo(method, json.dumps(told).encode(), **fields)


def ends(*codes: int, calls: int = 1, distinct: int = 1) -> Check:
    """All calls end with these statuses."""

    def check(ended: Ended) -> None:
        assert set(ended.statuses) <= set(codes), f"{ended.statuses}: {ended.message}"
        assert sum(ended.statuses.values()) >= calls, ended.statuses
        assert ended.distinct == distinct, ended.distinct

    return check


def answers(*responses: int | bytes, calls: int = 1) -> Check:
    """All calls end well, with these responses."""

    def check(ended: Ended) -> None:
        ends(_OK, calls=calls)(ended)
        _compare(ended, responses)

    return check


def answers_that(is_right: Callable[[list[bytes]], bool]) -> Check:
    """All calls end well, with responses that are right."""

    def check(ended: Ended) -> None:
        ends(_OK)(ended)
        assert is_right(ended.datas), ended.datas

    return check


def ends_after(code: int, *responses: int | bytes, within_s: float = 30.0) -> Check:
    """The call ends with a status after these responses."""

    def check(ended: Ended) -> None:
        ends(code)(ended)
        _compare(ended, responses)
        assert ended.seconds < within_s, f"took {ended.seconds} s"

    return check


def fails_as(error: errors.NeuronpipeError, *responses: bytes) -> Check:
    """The call ends with the error, whole, after these responses."""

    def check(ended: Ended) -> None:
        ends_after(CODES[type(error)], *responses)(ended)
        assert ended.message == error.message
        details = ended.trailing["grpc-status-details-bin"]
        assert isinstance(details, bytes)
        back = from_status(Status.FromString(details))
        assert (type(back), vars(back)) == (type(error), vars(error))

    return check


def _compare(ended: Ended, responses: Sequence[int | bytes]) -> None:
    came = [(size, checksum) for size, checksum, _ in ended.responses]
    assert len(came) == len(responses), f"{len(came)} responses instead of {len(responses)}"
    assert came == list(map(_measure, responses)), "other responses came"


def _measure(data: int | bytes) -> tuple[int, int]:
    data = pattern(data) if isinstance(data, int) else data
    return len(data), zlib.crc32(data)


def _joined(*sizes: int) -> bytes:
    whole = b"".join(map(pattern, sizes))
    return json.dumps({"count": len(sizes), "size": len(whole), "crc32": zlib.crc32(whole)}).encode()


def _failing(method: str, error: errors.NeuronpipeError, *arguments: object) -> Call:
    return _told(method, {"error": type(error).__name__, "arguments": list(arguments)})


def _has(expected: Iterable[tuple[str, str | bytes]]) -> Check:
    """The metadata that arrived are among others these, in their order."""
    pairs = [(key, base64.b64encode(value).decode() if isinstance(value, bytes) else value) for key, value in expected]
    keys = {key for key, _ in pairs}

    def is_right(responses: list[bytes]) -> bool:
        return [(key, value) for key, value in json.loads(responses[0]) if key in keys] == pairs

    return answers_that(is_right)


def _lists_services(responses: list[bytes]) -> bool:
    listed = ServerReflectionResponse.FromString(responses[0]).list_services_response
    return {SERVICE, "grpc.health.v1.Health"} <= {service.name for service in listed.service}


_SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
_UNICODE = "50 % of ‘Zürich’, \n日本 😀"
_PAIRS = (
    ("x-text", "a b, c=%20"),
    ("x-bytes-bin", bytes(range(256))),
    ("x-twice", "one"),
    ("x-twice", "two"),
    ("x-empty-bin", b""),
)
_NOT_FOUND = errors.ModelNotFound(_UNICODE)
_INVALID = errors.InvalidInput("text", "is empty")
_OVERLOADED = errors.Overloaded("full", 1.5)
_RAW, _AT_ONCE, _CANCEL, _GZIP = (frozenset({feature}) for feature in ("raw", "at once", "cancel", "gzip"))
_HEALTH = "/grpc.health.v1.Health"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def _case(name: str, *steps: tuple[Call, Check], **fields: Any) -> Case:
    """Makes a case of calls, each with its check."""
    calls, checks = zip(*steps, strict=True)
    return Case(name, calls, checks, **fields)


def _malformed(
    name: str, codes: int | tuple[int, ...], body: bytes, *metadata: tuple[str, str], trailing: str = ""
) -> Case:
    def check(ended: Ended) -> None:
        ends(*([codes] if isinstance(codes, int) else codes))(ended)
        assert trailing in ended.trailing or not trailing, ended.trailing

    raw = Call(f"/{SERVICE}/Echo", "unary", (body,), metadata, is_raw=True)
    return _case(name, (raw, check), _ECHOED, needs=_RAW)


def _health(method: str, kind: str = "unary", service: str = "", **fields: Any) -> Call:
    return Call(f"{_HEALTH}/{method}", kind, (HealthCheckRequest(service=service).SerializeToString(),), **fields)


def _beside_slow_calls(*metadata: tuple[str, str]) -> tuple[tuple[Call, Check], ...]:
    """Slow calls, a call with large metadata while they run, and one afterwards."""
    large = _echo("Echo", b"a", metadata=metadata, start_ms=300)
    return (
        (_told("Slow", {"seconds": 1}, repeat=20), ends(_OK, calls=20)),
        (large, ends(3, _RESOURCE_EXHAUSTED, _INTERNAL)),
        (_echo("Echo", b"a", start_ms=600), answers(b"a")),
    )


def _infers(method: str, kind: str, *requests: Message) -> Call:
    return Call(f"{_INFERENCE}/{method}", kind, tuple(request.SerializeToString() for request in requests))


_ECHOED = (_echo("Echo", b"a"), answers(b"a"))
_TOO_LARGE = (_echo("Echo", _MAX_MESSAGE_BYTES + 1), ends(_RESOURCE_EXHAUSTED))
_LISTED = Call(_REFLECTION, "bidi", (ServerReflectionRequest(list_services="*").SerializeToString(),))
_LARGE = ("x-large", "a" * 12_000)
# A step of streaming in each direction.
_JOINED = (_echo("Join", *[1000] * 50), answers(_joined(*[1000] * 50)))
_CHATTED = (_echo("Chat", *range(50)), answers(*range(50)))
_IDS = [str(number) for number in range(20)]

CASES = (
    _case("unary", _ECHOED),
    _case("empty message", (_echo("Echo", b""), answers(b""))),
    _case("server streaming", (_told("Split", {"count": 50, "size": 1000}), answers(*[1000] * 50))),
    _case("server streaming without a response", (_told("Split", {"count": 0, "size": 0}), answers())),
    _case("client streaming", _JOINED),
    _case("client streaming without a request", (_echo("Join"), answers(_joined()))),
    _case("bidirectional streaming", _CHATTED),
    _case(
        "30,000 messages of a byte",
        (_echo("Join", *[1] * 30_000), answers(_joined(*[1] * 30_000))),
        (_echo("Chat", *[1] * 30_000), answers(*[1] * 30_000)),
    ),
    _case("metadata, binary too", (_echo("Metadata", b"", metadata=_PAIRS), _has(_PAIRS))),
    _case(
        "errors with details",
        (_failing("Fail", _NOT_FOUND, _UNICODE), fails_as(_NOT_FOUND)),
        (_failing("Fail", _INVALID, "text", "is empty"), fails_as(_INVALID)),
        (_failing("Fail", _OVERLOADED, "full", 1.5), fails_as(_OVERLOADED)),
        (_failing("Falter", _NOT_FOUND, _UNICODE), fails_as(_NOT_FOUND, b"one", b"two")),
    ),
    _case("unknown method", *((Call(f"/{service}/None", "unary"), ends(12)) for service in (SERVICE, "none"))),
    _case("1 MiB", (_echo("Echo", _MIB), answers(_MIB))),
    _case("60 MiB", (_echo("Echo", 60 * _MIB), answers(60 * _MIB))),
    _case(
        "60 MiB in pieces",
        (_told("Split", {"count": 60, "size": _MIB}), answers(*[_MIB] * 60)),
        (_echo("Join", *[_MIB] * 60), answers(_joined(*[_MIB] * 60))),
        max_growth_mib=48,
    ),
    _case("message beyond the limit", _TOO_LARGE, _ECHOED),
    # Of these, a busy server has seen the call before its end.
    _case(
        "deadline",
        (_told("Slow", {"seconds": 60}, timeout_ms=1500), ends_after(_DEADLINE)),
        seen={"slow cancelled": 1},
    ),
    _case(
        "deadline of a stream",
        (_told("Split", {"count": 600, "size": 10, "pause_s": 100}, timeout_ms=1500), ends_after(_DEADLINE, 10)),
        seen={"split cancelled": 1},
    ),
    _case("deadline that is kept", (_echo("Echo", b"a", timeout_ms=60_000), answers(b"a"))),
    _case(
        "cancellation",
        (_told("Slow", {"seconds": 60}, cancel_after_ms=1500), ends_after(_CANCELLED)),
        needs=_CANCEL,
        seen={"slow cancelled": 1},
    ),
    _case(
        "cancellation of a stream",
        (_told("Split", {"count": 600, "size": 10, "pause_s": 0.02}, cancel_after=3), ends(_CANCELLED)),
        needs=_CANCEL,
        seen={"split cancelled": 1},
    ),
    _case(
        "answer before the request has ended",
        (_echo("Early", *[1000] * 4000, send_pause_ms=10), ends_after(_OK, 1000)),
        _ECHOED,
    ),
    _case(
        "1,000 streams at once", (_told("Slow", {"seconds": 0.5}, repeat=1000), ends(_OK, calls=1000)), needs=_AT_ONCE
    ),
    _case(
        "200 connections", (_echo("Echo", 100, repeat=200), answers(100, calls=200)), needs=_AT_ONCE, connections=200
    ),
    _case("gzip", (_echo("Echo", _MIB), answers(_MIB)), _JOINED, _CHATTED, needs=_GZIP, gzip=True),
    _case("gzip beyond the limit", _TOO_LARGE, _ECHOED, needs=_GZIP, gzip=True),
    _case(
        "slow reader",
        (_told("Split", {"count": 64, "size": _MIB}, read_pause_ms=20), answers(*[_MIB] * 64)),
        (_echo("Echo", b"a", start_ms=500), answers(b"a")),
        needs=frozenset({"slow reader"}),
        max_growth_mib=32,
    ),
    _case(
        "health",
        (Call(f"{_HEALTH}/Check", "unary"), answers(_SERVING)),
        (_health("Check", service=SERVICE), answers(_SERVING)),
        (_health("Check", service="no"), ends(5)),
    ),
    _case(
        "health watched", (_health("Watch", "server", cancel_after=1), ends_after(_CANCELLED, _SERVING)), needs=_CANCEL
    ),
    _case("reflection", (_LISTED, answers_that(_lists_services))),
    _case("12 KiB of metadata", (_echo("Metadata", b"", metadata=(_LARGE,)), _has([_LARGE]))),
    _case(
        "100 KiB of metadata",
        *_beside_slow_calls(*((f"x-large-{number}", "a" * 10_000) for number in range(10))),
        needs=_AT_ONCE,
    ),
    _case("100 KiB of metadata in one value", *_beside_slow_calls(("x-large", "a" * 100_000)), needs=_AT_ONCE),
    _case(
        "keepalive pings",
        (_told("Slow", {"seconds": 32}), ends(_OK)),
        needs=frozenset({"keepalive"}),
        keepalive_ms=10_000,
        plain_only=True,
    ),
    _case(
        "inference",
        (
            _infers("Infer", "unary", classify("A fine day.")),
            answers_that(lambda datas: InferResponse.FromString(datas[0]).HasField("result")),
        ),
        (
            _infers("InferBatch", "unary", InferBatchRequest(requests=[classify("a"), classify("b")])),
            answers_that(lambda datas: len(InferBatchResponse.FromString(datas[0]).outcomes) == 2),
        ),
        (
            _infers("InferStream", "bidi", *(InferStreamRequest(request=classify("a", request_id=id)) for id in _IDS)),
            answers_that(lambda datas: {InferStreamResponse.FromString(data).request_id for data in datas} == {*_IDS}),
        ),
        server="gateway",
    ),
    _malformed("malformed deadline", _INTERNAL, frames.message(b"a"), ("grpc-timeout", "5x")),
    _malformed("deadline of nine digits", _INTERNAL, frames.message(b"a"), ("grpc-timeout", "123456789S")),
    _malformed(
        "unknown encoding",
        _UNIMPLEMENTED,
        frames.message(b"a", flag=1),
        ("grpc-encoding", "lzw"),
        trailing="grpc-accept-encoding",
    ),
    _malformed("compressed without an encoding", _INTERNAL, frames.message(b"a", flag=1)),
    _malformed("compressed and broken", _INTERNAL, frames.message(b"no gzip", flag=1), ("grpc-encoding", "gzip")),
    _malformed("unary without a request", (3, _INTERNAL), b""),
    _malformed("request cut short", (3, _INTERNAL), frames.message(b"four")[:-1]),
)


def restart_case(lasts_s: float) -> Case:
    """Calls that go on while servers are replaced: short ones, and some that take a while. None may fail. If grpcio may
    not repeat what no server has seen, it fails one in a million: one that it begins as it learns of the end.

    A server that stops ends streams of requests, which clients may keep open for ever, so there are none.
    """
    for_ms = round(lasts_s * 1000)
    calls = (
        _echo("Echo", 200, repeat=16, for_ms=for_ms),
        _told("Slow", {"seconds": 0.2}, repeat=8, for_ms=for_ms),
        _told("Split", {"count": 20, "size": 1000, "pause_s": 0.03}, repeat=4, for_ms=for_ms),
    )
    return _case("restart", *((call, ends(_OK)) for call in calls), needs=_AT_ONCE, repeats=True)
