"""The application: finds the route, reads the body within limits, calls the handler, and sends its answer."""

import asyncio
import gzip
import math
import re
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from neuronpipe.core.addresses import is_loopback
from neuronpipe.core.callers import current_caller, enter_caller
from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.deadlines import Deadlines, Timeout
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, NeuronpipeError
from neuronpipe.core.names import ON_BEHALF, ROUTE_KEY, TRACEPARENT, TRACESTATE
from neuronpipe.core.parsing import Truncated
from neuronpipe.core.tracing import SpanContext, new_request_id
from neuronpipe.doors.http.bodies import read_body, write_body
from neuronpipe.doors.http.exchange import (
    JSON,
    TEXTS,
    HttpHandler,
    HttpHandlers,
    HttpRequest,
    HttpResponse,
    Route,
    read_header,
)
from neuronpipe.doors.http.problems import UNKNOWN_PATH, ErrorForm, Problem, RequestRefused, problem_of
from neuronpipe.doors.http.unknown_fields import STRICT_FIELD, UnknownFields
from neuronpipe.doors.http.wire import REQUEST_ID_HEADER, Exchange, too_large
from neuronpipe.doors.inference import PRIORITY_FIELD, read_priority
from neuronpipe.platform.process.door import Credentials, Guard
from neuronpipe.platform.process.in_flight import InFlight

TIMEOUT_HEADER = b"x-request-timeout-ms"
IGNORED_HEADER = b"x-neuronpipe-ignored"
# Smaller answers cost more to compress than to send.
_GZIP_FROM_BYTES = 64 << 10
_GZIP_LEVEL = 1
_COMPRESSED = (b"gzip", b"x-gzip", b"deflate")
# A weight of 0 refuses gzip (RFC 9110, 12.5.3).
_TAKES_GZIP = re.compile(rb"(?:^|,)\s*(?:x-)?gzip\s*(?:$|,|;(?!\s*q=0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)
# A value of zlib's wbits that reads both gzip and zlib, by their first bytes.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
# Largest body of a refused request whose connection is kept: a body of this size arrives with the headers anyway.
_DISCARDED_BYTES = 64 << 10
_TIMEOUT_DIGITS = 9
# The pipeline ends its work at the deadline, and knows why the work was late. Other waits of a handler, such as for
# the Redis of jobs, end this much later.
_SLACK_S = 0.1
# Maximum number of characters of a caller's word in an error.
_SHOWN = 200
_SEND_LESS = "; send less at once"
_OTHER_SITES = (b"cross-site", b"same-site")
_PREFLIGHT = b"access-control-request-method"
_PRIORITY = PRIORITY_FIELD.encode()
_ROUTE_KEY = ROUTE_KEY.encode()
_STRICT = STRICT_FIELD.encode()
_CREDENTIALS = (b"authorization", ON_BEHALF.encode())
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()

Headers = dict[bytes, bytes]


class RouteTable:
    """Routes by path and method. A model's name may have one slash, as on the Hub."""

    def __init__(self, handlers: HttpHandlers) -> None:
        """Indexes the routes. The last of several pairs with the same method and path counts."""
        self._fixed: dict[str, dict[str, tuple[Route, HttpHandler]]] = {}
        self._templates: dict[re.Pattern[str], dict[str, tuple[Route, HttpHandler]]] = {}
        for route, handler in handlers:
            if "{" in route.path:
                optional = re.sub(r"\{/(\w+)\}", r"(?:/(?P<\1>[^/]+))?", route.path)
                named = re.sub(r"\{(name|model)\}", r"(?P<\1>[^/]+(?:/[^/]+)?)", optional)
                pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", named))
                self._templates.setdefault(pattern, {})[route.method] = route, handler
            else:
                self._fixed.setdefault(route.path, {})[route.method] = route, handler

    def find(self, method: str, path: str) -> tuple[Route, HttpHandler, Mapping[str, str]]:
        """Returns the route, its handler, and the names in the path. Raises RequestRefused."""
        methods, names = self._fixed.get(path), {}
        if methods is None:
            for pattern, pattern_methods in self._templates.items():
                if match := pattern.fullmatch(path):
                    methods, names = pattern_methods, match.groupdict()
                    break
        if methods is None:
            raise RequestRefused(404, "not_found", "no such path; /openapi.json lists all of them")
        if pair := methods.get("GET" if method == "HEAD" else method):
            return *pair, names
        allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
        is_console = (method, path) == ("GET", "/")
        problem = "the console is off (set --console on)" if is_console else f"this path takes {allowed}"
        raise RequestRefused(405, "method_not_allowed", problem, (b"allow", allowed.encode()))


class _RoutedRequest(NamedTuple):
    """A request whose route is found. `names`: the names in the path."""

    route: Route
    handler: HttpHandler
    names: Mapping[str, str]
    headers: Headers
    request_id: str


class App:
    """The application that a server of HTTP calls for every request."""

    def __init__(
        self,
        in_flight: InFlight,
        max_file_bytes: int,
        guard: Guard | None = None,
        *,
        max_body_bytes: int = sys.maxsize,
        max_input_bytes: int = sys.maxsize,
        has_metrics_port: bool = False,
        hosts: Collection[str] = ("*",),
        cors_origins: Collection[str] = (),
        path_prefix: str = "",
    ) -> None:
        """`max_file_bytes`: limit of all bodies. `max_body_bytes`: limit of bodies that are texts. `max_input_bytes`:
        limit of each text in a body. `has_metrics_port`: metrics have an address of their own, which alone is open.
        HttpDoor explains the other arguments.
        """
        self.is_draining = False
        self._streaming: set[asyncio.Task[Any]] = set()
        self._deadlines = Deadlines()
        self._routes = RouteTable([])
        self._readers: dict[str, Callable[[bytes], Any]] = {}
        self._in_flight, self._guard = in_flight, guard
        self._max_file_bytes, self._max_input_bytes = max_file_bytes, max_input_bytes
        # The limit of texts, and the hint in its error.
        self._text_limit = max_file_bytes, _SEND_LESS
        if max_body_bytes < max_file_bytes:
            self._text_limit = max_body_bytes, " (the gateway's max_input_bytes, times 8)"
        self._open_services = set(guard.open_services) if guard else set()
        if has_metrics_port:
            self._open_services.discard("metrics")
        self._hosts, self._cors_origins, self._path_prefix = hosts, cors_origins, path_prefix

    def open(self, handlers: HttpHandlers) -> None:
        """Answers requests by these handlers from now on."""
        self._routes = RouteTable(handlers)
        for route, _ in handlers:
            if route.takes and not route.is_raw:
                kind = TypeAdapter(route.takes)
                self._readers[route.key] = partial(read_body, kind, max_text_bytes=self._max_input_bytes)

    async def __call__(self, exchange: Exchange) -> None:
        """Answers a request."""
        head = exchange.head
        headers: Headers = dict(reversed(head.fields))  # the first value of a name counts, as over gRPC
        request_id = _request_id(headers)
        error_form: ErrorForm = UNKNOWN_PATH
        id_headers = [REQUEST_ID_HEADER]
        with ExitStack() as streaming:  # resources that a stream holds until its end
            try:
                response = self._preflight(head.method, headers)
                if response is None:
                    found = self._routes.find(head.method, self._without_prefix(head.path))
                    routed = _RoutedRequest(*found, headers, request_id)
                    error_form = routed.route.error_form
                    id_headers += routed.route.id_headers
                    response = await self._answer(routed, exchange, streaming)
                if head.method == "HEAD" and response.stream:
                    response = replace(response, stream=_no_parts())
            except asyncio.CancelledError:
                if exchange.has_left:
                    return
                response = _error_response(problem_of(self._in_flight.stopping()), error_form)
            except (NeuronpipeError, RequestRefused) as error:
                response = _error_response(problem_of(error), error_form)
            except Exception as fault:
                response = _error_response(problem_of(internal_error(fault, Call(request_id))), error_form)
            finally:
                exchange.forget()
            await self._send(response, [(name, request_id.encode()) for name in id_headers], headers, exchange)

    def _preflight(self, method: str, headers: Headers) -> HttpResponse | None:
        """Returns the answer to a browser that asks whether a page may call; None for every other request."""
        if method != "OPTIONS" or _PREFLIGHT not in headers or not _is_origin_of(headers, self._cors_origins):
            return None
        allowed = (
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", b"600"),
        )
        return HttpResponse(b"", "text/plain", allowed)

    def _without_prefix(self, path: str) -> str:
        if self._path_prefix and f"{path}/".startswith(f"{self._path_prefix}/"):
            return path[len(self._path_prefix) :] or "/"
        return path

    def drain(self) -> None:
        """Ends streams that have no end, and asks callers to connect elsewhere."""
        self.is_draining = True
        for task in self._streaming:
            task.cancel()

    async def _answer(self, routed: _RoutedRequest, exchange: Exchange, streaming: ExitStack) -> HttpResponse:
        """Answers a request. `streaming`: gets the resources that a stream holds until its end."""
        route, handler, names, headers, request_id = routed
        if self._guard and route.service not in self._open_services:
            authorization, on_behalf = (read_header(headers, name) for name in _CREDENTIALS)
            enter_caller(self._guard.identify(Credentials(authorization, on_behalf=on_behalf)))
        elif not self._guard and "*" not in self._hosts and route.service != "health":
            _check_page(headers, exchange.head.method, self._hosts, self._cors_origins)
        query = exchange.head.query.decode("latin-1")
        if not route.is_counted:
            return await handler(HttpRequest(Call(request_id), names, query, headers, media_type="", body=b""))
        with ExitStack() as counted:
            counted.enter_context(self._in_flight)
            call = _call(headers, request_id)
            UnknownFields.enter(read_header(headers, _STRICT))
            media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
            body: Any = b""
            if route.method == "POST":
                self._in_flight.check_room(call.remaining_s)
                body = await self._read(route, headers, media_type, exchange)
            make = partial(self._in_flight.make, exchange.peer, len(body))
            if route.method == "POST" and not route.is_raw:
                body = await make(partial(self._readers[route.key], body))
            exchange.watch()
            deadline_s = None if call.deadline_s is None else call.deadline_s + _SLACK_S
            late = partial(DeadlineExceeded, "the deadline passed before the result was ready")
            with Timeout(self._deadlines, deadline_s, late):
                response = await handler(
                    HttpRequest(call, names, query, headers, media_type=media_type, body=body, make=make)
                )
            if response.stream:
                streaming.enter_context(counted.pop_all())
            return response

    async def _read(self, route: Route, headers: Headers, media_type: str, exchange: Exchange) -> bytes:
        """Returns the body of a request.

        Raises RequestRefused for a body that is not accepted, and NeuronpipeError for a body that takes too much
        time or memory.
        """
        if media_type not in (JSON, "", *route.takes_media):
            raise RequestRefused(
                415,
                "unsupported_media_type",
                f"content-type: must be {' or '.join((JSON, *route.takes_media))} (curl: -H 'Content-Type: {JSON}')",
            )
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"identity", *_COMPRESSED):
            raise RequestRefused(415, "unsupported_media_type", "content-encoding: must be gzip or deflate")
        limit, hint = self._max_file_bytes, _SEND_LESS
        if media_type in TEXTS or not route.takes_media:
            limit, hint = self._text_limit
        if int(headers.get(b"content-length", b"0")) > limit:
            raise too_large(limit, hint)
        refusals: list[NeuronpipeError] = []
        timer = asyncio.timeout(None)

        def refuse(error: NeuronpipeError) -> None:
            refusals.append(error)
            timer.reschedule(asyncio.get_running_loop().time())

        try:
            with self._in_flight.arriving(exchange.peer, refuse) as has_come:
                async with timer:
                    body = await exchange.read(limit, hint, has_come)
                    if encoding in _COMPRESSED:
                        body = await self._decompressed(body, limit, hint, exchange.peer)
        except TimeoutError:
            raise refusals[0] from None
        if len(body) > self._text_limit[0] and not media_type and body.lstrip()[:1] in (b"{", b"["):
            raise too_large(*self._text_limit)
        return body

    async def _decompressed(self, data: bytes, limit: int, hint: str, connection: str) -> bytes:
        """Decompresses a body. A large body counts by the size that it may become. Raises the errors of `_read`."""
        try:
            body = await self._in_flight.inflate(connection, data, _GZIP_OR_ZLIB, limit)
        except zlib.error:
            raise InvalidInput("body", "is not compressed as content-encoding says") from None
        except Truncated:
            raise InvalidInput("body", "its compressed data ends too early or too late") from None
        if body is None:
            raise too_large(limit, hint)
        return body

    async def _send(
        self, response: HttpResponse, ids: Iterable[tuple[bytes, bytes]], headers: Headers, exchange: Exchange
    ) -> None:
        """Sends a response. `ids`: the headers with the id of the request."""
        body = response.body
        fields = [(b"content-type", response.media_type.encode()), *ids, *response.headers]
        if ignored := UnknownFields.header():
            fields.append((IGNORED_HEADER, ignored))
        if self._cors_origins:
            fields.append((b"vary", b"origin"))
            if _is_origin_of(headers, self._cors_origins):
                fields.append((b"access-control-allow-origin", headers[b"origin"]))
                fields.append((b"access-control-expose-headers", b"*"))
        if response.is_compressible and len(body) >= _GZIP_FROM_BYTES:
            fields.append((b"vary", b"accept-encoding"))
            if _TAKES_GZIP.search(headers.get(b"accept-encoding", b"")):
                body = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL)
                fields.append((b"content-encoding", b"gzip"))
        is_large = b"transfer-encoding" in headers or int(headers.get(b"content-length", b"0")) > _DISCARDED_BYTES
        if self.is_draining or (is_large and not exchange.has_read_all):
            fields.append((b"connection", b"close"))
        if response.stream:
            await exchange.begin(response.status, fields)
            await self._send_parts(response, response.stream, exchange)
            return
        fields.append((b"content-length", str(len(body)).encode()))
        await exchange.answer(response.status, fields, body)

    async def _send_parts(self, response: HttpResponse, parts: AsyncGenerator[bytes, None], exchange: Exchange) -> None:
        task, is_endless = asyncio.current_task(), response.is_endless
        assert task  # noqa: S101
        if is_endless:
            self._streaming.add(task)
        exchange.watch()
        try:
            async with aclosing(parts):
                while not (is_endless and self.is_draining):
                    await exchange.write(await anext(parts))
        except StopAsyncIteration:
            pass
        except asyncio.CancelledError:
            if exchange.has_left:
                return
            if response.last_event:
                await exchange.write(response.last_event(self._in_flight.stopping()))
            elif not is_endless:  # the connection breaks off, so that no caller takes the stream for complete
                raise
        finally:
            self._streaming.discard(task)
            exchange.forget()
        await exchange.end()


async def _no_parts() -> AsyncGenerator[bytes, None]:
    for part in tuple[bytes, ...]():
        yield part


def _is_origin_of(headers: Headers, origins: Collection[str]) -> bool:
    """Returns whether a page of one of these origins sends a request."""
    origin = read_header(headers, b"origin").lower()
    return bool(origin) and (origin in origins or "*" in origins)


def _check_page(headers: Headers, method: str, hosts: Collection[str], origins: Collection[str]) -> None:
    """Refuses requests that a page of another site makes a browser send. Pages of `origins` may call.

    Without credentials, a request of the page would pass for a request of the browser's user (CSRF). If the site's name
    leads to this gateway, the page would also get the answer (DNS rebinding).
    """
    host = read_header(headers, b"host").lower()
    if host and not _is_own(host, hosts):
        raise RequestRefused(
            403, "forbidden", f"host: {host[:_SHOWN]!r} is not a name of this gateway (add it with --http-hosts)"
        )
    if _is_origin_of(headers, origins):
        return
    origin = read_header(headers, b"origin").lower().rpartition("://")[2]
    is_page_call = headers.get(b"sec-fetch-mode") != b"navigate" or method not in ("GET", "HEAD")
    if (is_page_call and headers.get(b"sec-fetch-site") in _OTHER_SITES) or (
        b"origin" in headers and origin != host and not (hosts and _is_own(origin, hosts))
    ):
        problem = "origin: pages of other sites may not call this gateway (permit them with --http-cors-origins)"
        raise RequestRefused(403, "forbidden", problem)


def _is_own(host: str, hosts: Collection[str]) -> bool:
    """Returns whether a host is a name of the gateway or of this machine alone. Without names, all hosts are."""
    name = re.sub(r":\d*$", "", host).strip("[]")
    return not hosts or name in hosts or name.endswith(".localhost") or is_loopback(f"{name}:0")


def _request_id(headers: Headers) -> str:
    """Returns the caller's id of the request, or a new id."""
    request_id = read_header(headers, REQUEST_ID_HEADER)
    return request_id if request_id and request_id.isascii() and request_id.isprintable() else new_request_id()


def _call(headers: Headers, request_id: str) -> Call:
    """Returns the caller, the deadline, the priority and the trace context of a request. Raises InvalidInput."""
    deadline_s = None
    if timeout := headers.get(TIMEOUT_HEADER):
        if not timeout.isdigit() or len(timeout) > _TIMEOUT_DIGITS:
            raise InvalidInput(
                TIMEOUT_HEADER.decode(), f"must be a whole number of milliseconds, of at most {_TIMEOUT_DIGITS} digits"
            )
        deadline_s = time.monotonic() + int(timeout) / 1000
    trace = None
    if traceparent := headers.get(_TRACEPARENT):
        trace = SpanContext.parse(traceparent.decode("latin-1"), read_header(headers, _TRACESTATE))
    priority = read_priority(read_header(headers, _PRIORITY))
    route_key = read_header(headers, _ROUTE_KEY)
    return Call(request_id, deadline_s, priority, trace, current_caller(), route_key=route_key)


def _error_response(problem: Problem, form: ErrorForm) -> HttpResponse:
    headers = list(problem.headers)
    if problem.retry_after_s is not None:
        # HTTP has whole seconds; OpenAI's clients also read milliseconds.
        headers.append((b"retry-after", str(max(1, math.ceil(problem.retry_after_s))).encode()))
        headers.append((b"retry-after-ms", str(max(1, round(problem.retry_after_s * 1000))).encode()))
    return HttpResponse(write_body(form.write(problem)), form.media_type, headers, problem.codes.status)
