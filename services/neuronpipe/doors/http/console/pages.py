"""The console's routes: its files, what they ask, kept traces, and the stream of live figures."""

from importlib.resources import files

from google.protobuf.json_format import MessageToDict

from neuronpipe import __version__
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest
from neuronpipe.core.metrics import Meters
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.console.live import LiveFigures
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import Refused
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.platform.process.door import Handler

# Open as health is: without its files the page cannot ask for a key.
PAGE = Route("GET", "/", "the console", is_counted=False, service="health")
FILE = Route("GET", "/console/{name}", "a file of the console", is_counted=False, service="health")
STATE = Route("GET", "/console/state", "what the console shows of the server", is_counted=False)
TRACE = Route("GET", "/console/traces/{id}", "a kept trace as OTLP JSON", is_counted=False)
LIVE = Route(
    "GET",
    "/console/live",
    "live figures as server-sent events; ?model= of one model",
    is_counted=False,
    service="metrics",
)
CONSOLE_ROUTES = (PAGE, FILE, STATE, TRACE, LIVE)

_PAGE_FILE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own files and asks its own server, and no other page may show it. Pictures that are to be sent are
# shown from memory (blob:).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def console_handlers(
    catalog: Catalog, meters: Meters, grpc_port: int, get_trace: Handler | None = None
) -> dict[str, HttpHandler]:
    """The handlers, by route.

    `grpc_port`: of the same gateway, for examples of calls. `get_trace`: TraceService's, of a server that keeps traces.
    """
    responses = {
        file.name: HttpResponse(file.read_bytes(), _MEDIA_TYPES[f".{file.name.rpartition('.')[2]}"], _HEADERS)
        for file in (files(__package__) / "static").iterdir()
    }
    live = LiveFigures(meters)

    async def page(request: HttpRequest) -> HttpResponse:
        return responses[_PAGE_FILE]

    async def file(request: HttpRequest) -> HttpResponse:
        if request.names["name"] not in responses:
            raise Refused(404, "not_found", "the console has no such file")
        return responses[request.names["name"]]

    async def state(request: HttpRequest) -> HttpResponse:
        models = MessageToDict(
            catalog.list_models(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        told = {"version": __version__, "grpc_port": grpc_port, "keeps_traces": get_trace is not None, **models}
        told["samples"] = SAMPLES
        return HttpResponse(write_body(told), headers=_HEADERS)

    async def trace(request: HttpRequest) -> HttpResponse:
        if not get_trace:
            raise Refused(404, "not_found", "the server keeps no traces (kept_traces)")
        found = await get_trace(GetTraceRequest(trace_id=request.names["id"]), None)
        return HttpResponse(found.otlp_json.encode(), headers=_HEADERS)

    async def stream(request: HttpRequest) -> HttpResponse:
        return HttpResponse(
            b"", "text/event-stream", _HEADERS, stream=live.listen(request.parameter("model")), is_endless=True
        )

    return {PAGE.key: page, FILE.key: file, STATE.key: state, TRACE.key: trace, LIVE.key: stream}
