"""What passes between the server and a protocol: a request, a response, and a route, which declares both."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from neuronpipe.core.calls import Call
from neuronpipe.gateway.doors.http.problems import PROBLEM_DETAILS, ErrorForm

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose body has arrived.

    `names`: what stands in the path for the names of its route. `query`: as sent. `media_type`: of the body, in lower
    case and without parameters. `body`: the value that the route takes, or the bytes as they came where the route is
    raw.
    """

    call: Call
    names: Mapping[str, str]
    query: str
    headers: Mapping[bytes, bytes]
    media_type: str
    body: Any

    def parameter(self, name: str) -> str:
        """A parameter of the query; empty where it is missing."""
        return parse_qs(self.query).get(name, [""])[-1] if self.query else ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer. `is_compressible`: worth compressing where it is large."""

    body: bytes
    media_type: str = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()
    status: int = 200
    is_compressible: bool = True


HttpHandler: TypeAlias = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path; names in the path are in braces and stand for one segment each.

    `takes`, `gives`: the types of the bodies in JSON, from which pydantic makes checks and schemas; None for none.
    `is_raw`: bodies are handed over as bytes, since what they must be depends on the model; of these media types
    besides JSON, `takes_media`. `query`: its parameters, with what they mean. `is_counted`: false for what must be
    answered while the process starts and drains.
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

    @property
    def key(self) -> str:
        """What a handler is found by."""
        return f"{self.method} {self.path}"


# The door itself answers these, also while the process starts and drains.
HEALTH_ROUTES = (
    Route("GET", "/health", "TEI and others: 200 while requests are answered, 503 else", is_counted=False),
    Route("GET", "/ping", "SageMaker: the same", is_counted=False),
)
