"""The values between the server and a protocol: a request, a response, and a route, which declares both."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qs

from typing_extensions import TypedDict

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.problems import PROBLEM_DETAILS, ErrorForm
from neuronpipe.doors.inference import MODEL_FIELD, VERSION_FIELD, ModelName

JSON = "application/json"
_MODEL, _VERSION = MODEL_FIELD.encode(), VERSION_FIELD.encode()
# Media types of texts; all others are files.
TEXTS = (JSON, "text/csv", "application/jsonlines", "application/x-ndjson", "application/x-amz-json-1.1")

# Runs a function that makes objects from the body, for a large body in a thread (see InFlight.make).
Make: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


def read_header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """Returns the value of a header; empty if it is missing."""
    return headers.get(name, b"").decode("latin-1")


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose body has arrived.

    - `names`: the values of the names in the route's path.
    - `query`: the query as sent.
    - `media_type`: the body's media type in lower case, without parameters.
    - `body`: the value that the route takes, or the bytes if the route is raw.
    - `make`: runs the function that reads such bytes.
    """

    call: Call
    names: Mapping[str, str]
    query: str
    headers: Mapping[bytes, bytes]
    media_type: str
    body: Any
    make: Make = _at_once

    def model(self, name: str | None = None) -> ModelName:
        """Returns the model that the body or the path names, or else the query or a header, and a header's version."""
        name = name or self.parameter("model") or read_header(self.headers, _MODEL)
        return ModelName(name, read_header(self.headers, _VERSION))

    def parameter(self, name: str) -> str:
        """Returns a parameter of the query; empty if it is missing."""
        return parse_qs(self.query).get(name, [""])[-1] if self.query else ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer. `is_compressible`: worth compressing if it is large.

    `stream`: parts that are sent instead of a body as they come, until the caller leaves. A stream that `is_endless`
    ends when the process drains; its route must not be counted. `last_event`: makes the last part of a stream that an
    error ends.
    """

    body: bytes
    media_type: str = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()
    status: int = 200
    is_compressible: bool = True
    stream: AsyncGenerator[bytes, None] | None = None
    is_endless: bool = False
    last_event: Callable[[NeuronpipeError], bytes] | None = None


HttpHandler: TypeAlias = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]
# Every route of an HTTP door with its handler.
HttpHandlers: TypeAlias = Sequence[tuple["Route", HttpHandler]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. A name in braces in the path stands for one segment, `{/name}` for an optional segment.

    - `takes`: the type of the body in JSON, from which pydantic makes checks and a schema; None for no body.
    - `gives`: the type of the answer; see `named`.
    - `is_raw`: the handler gets the body as bytes, because its type depends on the model.
    - `takes_media`: media types of raw bodies in addition to JSON.
    - `query`: parameters with their meanings.
    - `id_headers`: names of headers in which the answer also has the id of the request.
    - `is_counted`: false for a route that must answer while the process starts and drains.
    - `service`: "health", "reflection" or "metrics" if the route may be open to callers without credentials.
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
    id_headers: Sequence[bytes] = ()
    is_counted: bool = True
    service: str = ""

    @property
    def key(self) -> str:
        """The method and the path."""
        return f"{self.method} {self.path}"

    @property
    def shown_path(self) -> str:
        """The path without its optional segments."""
        return re.sub(r"\{/\w+\}", "", self.path)


def named(name: str, description: str | None = None, /, **fields: Any) -> Any:
    """Returns the type of an object in answers, which may have more fields. /openapi.json has the type by its name."""
    answer = TypedDict(name, fields)  # type: ignore[misc]
    answer.__doc__ = description
    return answer


ServiceT = TypeVar("ServiceT")
# The routes of a protocol, and the functions that answer them with the help of a service, such as the inference.
Answers: TypeAlias = Iterable[tuple[Route, Callable[[ServiceT, HttpRequest], Coroutine[Any, Any, HttpResponse]]]]


def handlers_for(service: ServiceT, answers: Answers[ServiceT]) -> HttpHandlers:
    """Makes the handlers of a protocol's functions, which all get the same service."""
    return [(route, partial(answer, service)) for route, answer in answers]


_health = partial(Route, "GET", is_counted=False, service="health")
LIVE, READY = (
    _health(f"/v2/health/{word}", f"OIP: {meaning}", gives=dict[str, bool])
    for word, meaning in (("live", "200 while the process need not be replaced"), ("ready", "as /health"))
)
# The door itself answers these routes, also while the process starts and drains.
HEALTH_ROUTES = (
    _health("/health", "TEI and others: 200 if the server answers requests, otherwise 503"),
    _health("/ping", "SageMaker: the same"),
    READY,
    LIVE,
)
