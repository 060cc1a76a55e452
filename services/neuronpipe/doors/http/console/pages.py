"""The console's routes: its files and the API's page, the state of the server, kept traces, and live figures."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray

from neuronpipe import __version__
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest, GetTraceResponse
from neuronpipe.core.callers import current_caller
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.metrics import Histogram, Meters
from neuronpipe.core.names import Attributes, Instrument, Metrics, Spans
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.core.tracing import status_name
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.events import EVENTS, event
from neuronpipe.doors.http.exchange import HttpHandler, HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import RequestRefused
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.tenants.tenants import FairLimit

_get = partial(Route, "GET", is_counted=False)
# The files are open as health is: without them the page cannot ask for a key.
PAGE = _get("/", "the console", service="health")
FILE = _get("/console/{file}", "a file of the console", service="health")
API = _get("/docs", "the API as a page, to read and to try", service="health")
API_FILE = _get("/docs/{file}", "a file of that page", service="health")
STATE = _get("/console/state", "the state of the server for the console")
TRACE = _get("/console/traces/{id}", "a kept trace as OTLP JSON")
LIVE = _get("/console/live", "live figures as server-sent events; ?model= of one model", service="metrics")

_PAGE_FILE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# The page runs its own files, asks its own server, shows pictures from memory (blob:), and no page may show it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
# Swagger UI puts HTML that it has cleaned into its page, and has its icons as data.
_API_POLICY = _POLICY.replace("; require-trusted-types-for 'script'", "").replace("blob:", "data:")
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def console_handlers(
    catalog: Catalog,
    meters: Meters,
    grpc_port: int,
    get_trace: Callable[[GetTraceRequest], Awaitable[GetTraceResponse]] | None = None,
) -> HttpHandlers:
    """Returns the routes with their handlers.

    `grpc_port`: the port of the gateway's gRPC, for examples of calls. `get_trace`: finds a trace if the server keeps
    traces.
    """
    live = LiveFigures(meters)
    file, api_file = _files("static", _POLICY), _files("docs", _API_POLICY)

    async def state(request: HttpRequest) -> HttpResponse:
        models = MessageToDict(
            catalog.list_models(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        facts = {"version": __version__, "grpc_port": grpc_port, "keeps_traces": get_trace is not None}
        return HttpResponse(write_body(facts | models | {"samples": SAMPLES}), headers=_HEADERS)

    async def trace(request: HttpRequest) -> HttpResponse:
        if not get_trace:
            raise RequestRefused(404, "not_found", "the server keeps no traces (kept_traces)")
        response = await get_trace(GetTraceRequest(trace_id=request.names["id"]))
        return HttpResponse(response.otlp_json.encode(), headers=_HEADERS)

    async def stream(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"", EVENTS, _HEADERS, stream=live.listen(request.parameter("model")), is_endless=True)

    pages = [(PAGE, file), (FILE, file), (API, api_file), (API_FILE, api_file)]
    return [*pages, (STATE, state), (TRACE, trace), (LIVE, stream)]


def _files(folder: str, policy: str) -> HttpHandler:
    """Returns the handler of a folder of files, which shows its page where a request names no file."""
    headers = ((b"content-security-policy", policy.encode()), *_HEADERS[1:])
    responses = {
        file.name: HttpResponse(file.read_bytes(), _MEDIA_TYPES[f".{file.name.rpartition('.')[2]}"], headers)
        for file in (files(__package__) / folder).iterdir()
    }

    async def answer(request: HttpRequest) -> HttpResponse:
        name = request.names.get("file", _PAGE_FILE)
        if name not in responses:
            raise RequestRefused(404, "not_found", "the console has no such file")
        return responses[name]

    return answer


_INTERVAL_S = 1.0
# Number of intervals that percentiles, means and shares cover. Rates cover the last interval.
_WINDOW = 10
_MAX_LISTENERS = 16
_RETRY_S = 5.0
# Duration of a stream, after which the console asks again.
_LONGEST_S = 3600.0
_PERCENTILES = (50, 95, 99)
_STAGES = (Spans.PREPROCESS, Spans.PREDICT, Spans.QUEUE, Spans.COMPUTE, Spans.POSTPROCESS)
_OK = status_name(None)
# Figures that the console shows as rates per second.
_RATES = {
    "tokens_per_s": Metrics.REQUEST_TOKENS,
    "shed_per_s": Metrics.SHED,
    "expired_per_s": Metrics.EXPIRED,
    "cancelled_per_s": Metrics.CANCELLED,
    "busy_cores": Metrics.CORE_BUSY,
}
# Figures that the console shows as they are.
_PRESENT = {
    "in_flight": Metrics.REQUESTS_IN_FLIGHT,
    "tokens_in_flight": Metrics.TOKENS_IN_FLIGHT,
    "queue_sequences": Metrics.QUEUE_SEQUENCES,
    "queue_tokens": Metrics.QUEUE_TOKENS,
}
_OTHERS = (Metrics.REQUEST_DURATION, Metrics.STAGE_DURATION, Metrics.TOKEN_CACHE, Metrics.RESULT_CACHE)
_BATCHES = (Metrics.BATCH_SIZE, Metrics.BATCH_PADDING)
_NAMES = {instrument.name for instrument in (*_RATES.values(), *_PRESENT.values(), *_OTHERS, *_BATCHES)}

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics at one time, by instrument and by the value of its last label, if it has a label beside the model.

    Numbers are float64: [1] for a counter or gauge; the total and then the counts for a histogram.
    """

    at_s: float
    numbers: Mapping[str, Mapping[str, Numbers]]

    def total(self, instrument: Instrument) -> float | None:
        """Returns the sum over all labels; None if this process does not have the metric."""
        parts = self.numbers.get(instrument.name)
        return float(sum(part[0] for part in parts.values())) if parts else None

    def since(self, before: "Reading", instrument: Instrument) -> dict[str, Numbers]:
        """Returns the numbers that were recorded between two readings."""
        then = before.numbers.get(instrument.name, {})
        return {part: now - then.get(part, 0.0) for part, now in self.numbers.get(instrument.name, {}).items()}


class LiveFigures:
    """Streams of server-sent events, one for each listener. The number of listeners is limited."""

    def __init__(self, meters: Meters, interval_s: float = _INTERVAL_S) -> None:
        self.listeners = FairLimit(_MAX_LISTENERS)
        self._meters = meters
        self._interval_s = interval_s

    def listen(self, model: str) -> AsyncGenerator[bytes, None]:
        """Returns the figures of one model, or of all models, now and after every interval, for an hour.

        Raises Overloaded if the caller's tenant has as many listeners as are left for others.
        """
        tenant = current_caller().tenant
        if not self.listeners.has_room(tenant):
            raise Overloaded(f"{self.listeners.total} consoles show live figures, the limit", retry_after_s=_RETRY_S)
        return self._events(model, tenant)

    async def _events(self, model: str, tenant: str) -> AsyncGenerator[bytes, None]:
        self.listeners.take(tenant)
        ends_s = time.monotonic() + _LONGEST_S
        try:
            readings = deque([read(self._meters, model)] * 2, _WINDOW + 1)
            while time.monotonic() < ends_s:
                yield event(write_body(figures(readings)))
                await asyncio.sleep(self._interval_s)
                readings.append(read(self._meters, model))
        finally:
            self.listeners.give_back(tenant)


def read(meters: Meters, model: str) -> Reading:
    """Reads the metrics of one model, or of all models."""
    numbers: dict[str, dict[str, Numbers]] = {}
    for family in meters.families():
        instrument = family.instrument
        if instrument.name not in _NAMES:
            continue
        is_of_model = Attributes.MODEL in instrument.labels
        parts = numbers.setdefault(instrument.name, {})
        for labels, series in family.series.items():
            if model and is_of_model and labels[0] != model:
                continue
            part = labels[2] if len(labels) > 2 else ""
            counts = [series.total, *series.counts] if isinstance(series, Histogram) else [family.number(series)]
            parts[part] = parts.get(part, 0.0) + np.array(counts, np.float64)
    return Reading(time.monotonic(), numbers)


def figures(readings: Sequence[Reading]) -> dict[str, Any]:
    """Returns the figures of the page, from the oldest reading to the newest."""
    oldest, before, now = readings[0], readings[-2], readings[-1]
    elapsed_s = now.at_s - before.at_s

    def per_s(number: float) -> float:
        return number / elapsed_s if elapsed_s else 0.0

    def rate(instrument: Instrument) -> float:
        return per_s(sum(float(part[0]) for part in now.since(before, instrument).values()))

    ended = {status: float(part[1:].sum()) for status, part in now.since(before, Metrics.REQUEST_DURATION).items()}
    requests = sum(now.since(oldest, Metrics.REQUEST_DURATION).values(), np.zeros(1))
    stages = now.since(oldest, Metrics.STAGE_DURATION)
    return {
        "window_s": now.at_s - oldest.at_s,
        "requests_per_s": per_s(sum(ended.values())),
        "errors_per_s": per_s(sum(ended.values()) - ended.get(_OK, 0.0)),
        **{name: rate(instrument) for name, instrument in _RATES.items()},
        **{name: now.total(instrument) for name, instrument in _PRESENT.items()},
        "batch_size": _mean(now.since(oldest, Metrics.BATCH_SIZE)),
        "padding_ratio": _mean(now.since(oldest, Metrics.BATCH_PADDING)),
        "token_cache_hits": _hits(now.since(oldest, Metrics.TOKEN_CACHE)),
        "result_cache_hits": _hits(now.since(oldest, Metrics.RESULT_CACHE)),
        "stages": {
            "request": _percentiles_ms(Metrics.REQUEST_DURATION, requests),
            **{
                str(stage): _percentiles_ms(Metrics.STAGE_DURATION, stages.get(stage, np.zeros(1))) for stage in _STAGES
            },
        },
    }


def _mean(parts: Mapping[str, Numbers]) -> float | None:
    count = sum(float(part[1:].sum()) for part in parts.values())
    return sum(float(part[0]) for part in parts.values()) / count if count else None


def _hits(parts: Mapping[str, Numbers]) -> float | None:
    """Returns the share of lookups that hit."""
    total = sum(float(part[0]) for part in parts.values())
    return sum(float(part[0]) for word, part in parts.items() if word.startswith("hit")) / total if total else None


def _percentiles_ms(instrument: Instrument, numbers: Numbers) -> dict[str, float | None]:
    counts = numbers[1:]
    return {
        f"p{percent}_ms": _quantile(instrument.bounds, counts, percent / 100) if counts.any() else None
        for percent in _PERCENTILES
    }


def _quantile(bounds_ns: Sequence[float], counts: Numbers, share: float) -> float:
    """Returns a quantile in ms, as Prometheus' histogram_quantile estimates it: values lie evenly in their bucket."""
    reached = np.cumsum(counts)
    wanted = share * reached[-1]
    bucket = int(np.searchsorted(reached, wanted))
    if bucket == len(bounds_ns):  # beyond the last bound
        return bounds_ns[-1] / 1e6
    below = bounds_ns[bucket - 1] if bucket else 0.0
    inside = (wanted - (reached[bucket] - counts[bucket])) / counts[bucket]
    return float(below + (bounds_ns[bucket] - below) * inside) / 1e6
