"""The values between the server and a protocol: a request, a response, and a route, which declares both."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.problems import PROBLEM_DETAILS, ErrorForm
from neuronpipe.doors.inference import MODEL_FIELD, VERSION_FIELD, ModelName

JSON = "application/json"
# Media types of texts; all others are files.
TEXTS = (JSON, "text/csv", "application/jsonlines", "application/x-ndjson", "application/x-amz-json-1.1")

# Runs a function that makes objects of the body, for a large body in a thread (see InFlight.make).
Make: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose body has arrived.

    `names`: the values of the names in the route's path. `query`: as sent. `media_type`: of the body, in lower case and
    without parameters. `body`: the value that the route takes, or the bytes as they came where the route is raw. `make`
    runs the function that reads such bytes.
    """

    call: Call
    names: Mapping[str, str]
    query: str
    headers: Mapping[bytes, bytes]
    media_type: str
    body: Any
    make: Make = _at_once

    def model(self, name: str | None = None) -> ModelName:
        """The model that the body or the path names, or else the query or a header, with the version of a header."""
        name = name or self.parameter("model") or self._header(MODEL_FIELD)
        return ModelName(name, self._header(VERSION_FIELD))

    def _header(self, name: str) -> str:
        return self.headers.get(name.encode(), b"").decode("latin-1")

    def parameter(self, name: str) -> str:
        """A parameter of the query; empty where it is missing."""
        return parse_qs(self.query).get(name, [""])[-1] if self.query else ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer. `is_compressible`: worth compressing where it is large.

    `stream`: parts that are sent instead of a body as they come, until the caller leaves. A stream that `is_endless`
    ends when the process drains; its route must not be counted. `tell`: the last part of a stream that an error ends.
    """

    body: bytes
    media_type: str = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()
    status: int = 200
    is_compressible: bool = True
    stream: AsyncGenerator[bytes, None] | None = None
    is_endless: bool = False
    tell: Callable[[NeuronpipeError], bytes] | None = None


HttpHandler: TypeAlias = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]
# Every route of an HTTP door with its handler.
HttpHandlers: TypeAlias = Sequence[tuple["Route", HttpHandler]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path; names in the path are in braces and stand for one segment each. `{/name}` is a segment
    that may be missing.

    `takes`, `gives`: the types of the bodies in JSON, from which pydantic makes checks and schemas; None for none.
    `is_raw`: bodies are handed over as bytes, since what they must be depends on the model; of these media types
    besides JSON, `takes_media`. `query`: its parameters, with what they mean. `is_counted`: false for what must be
    answered while the process starts and drains. `service`: "health", "reflection" or "metrics" where that may
    be open to callers without credentials.
    """

    method: str
    path: str
    summary: str
    takes: Any = None
    gives: Any = None
    error_form: ErrorForm = PROBLEM_DETAILS
    is_raw: bool = False
    takes_media: Sequence[str] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    is_counted: bool = True
    service: str = ""

    @property
    def key(self) -> str:
        """The method and the path."""
        return f"{self.method} {self.path}"

    @property
    def shown_path(self) -> str:
        """The path without what may be missing in it."""
        return re.sub(r"\{/\w+\}", "", self.path)


LIVE, READY = (
    Route("GET", f"/v2/health/{word}", f"OIP: {told}", gives=dict[str, bool], is_counted=False, service="health")
    for word, told in (("live", "200 while the process need not be replaced"), ("ready", "as /health"))
)
# The door itself answers these routes, also while the process starts and drains.
HEALTH_ROUTES = (
    Route(
        "GET",
        "/health",
        "TEI and others: 200 while requests are answered, 503 else",
        is_counted=False,
        service="health",
    ),
    Route("GET", "/ping", "SageMaker: the same", is_counted=False, service="health"),
    READY,
    LIVE,
)
