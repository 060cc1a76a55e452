"""All protocols of the HTTP door, and the metrics on its port."""

import asyncio
import time
from collections.abc import Callable

from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.http import (
    anthropic,
    cohere,
    huggingface,
    moderations,
    native,
    oip,
    openai,
    openai_responses,
    openai_text,
    rerank,
    sagemaker,
    tei,
    tgi,
    tokens,
    vllm,
)
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route, handlers_for, read_header
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.oip.service import TensorService

METRICS = Route("GET", "/metrics", "the metrics, for Prometheus", is_counted=False, service="metrics")
# The protocols whose handlers need the inference.
_PROTOCOLS = (
    native,
    openai,
    openai_text,
    openai_responses,
    anthropic,
    cohere,
    moderations,
    rerank,
    tei,
    tgi,
    tokens,
    vllm,
    huggingface,
    sagemaker,
)


def http_handlers(inference: Inference, tensors: TensorService, telemetry: Telemetry) -> HttpHandlers:
    """Returns the handlers of the routes in /openapi.json, except routes of health and of further packages."""
    return [
        *handlers_for(inference, [answer for protocol in _PROTOCOLS for answer in protocol.ANSWERS]),
        *handlers_for(tensors, oip.ANSWERS),
        *metrics_handlers(telemetry.write_metrics),
    ]


_PAUSES = 4
# The format with exemplars, for scrapers that accept it; other scrapers get plain text.
_OPEN_METRICS = "application/openmetrics-text"


def metrics_handlers(write: Callable[[str], tuple[bytes, str]]) -> HttpHandlers:
    """Returns the route with its handler. `write`: see Telemetry.

    Pages are written in turn, with pauses of `_PAUSES` times the duration of the previous page, because the thread that
    writes delays the event loop. Scrapes that wait for a page of the same format get the same page.
    """
    turn, may_begin_s = asyncio.Lock(), 0.0
    next_pages: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def write_next(accept: str) -> tuple[bytes, str]:
        nonlocal may_begin_s
        async with turn:
            await asyncio.sleep(max(0.0, may_begin_s - time.monotonic()))
            del next_pages[accept]  # scrapes that arrive from now on get a newer page
            began_s = time.monotonic()
            page = await asyncio.to_thread(write, accept)
            ended_s = time.monotonic()
            may_begin_s = ended_s + _PAUSES * (ended_s - began_s)
        return page

    async def metrics(request: HttpRequest) -> HttpResponse:
        accept = _OPEN_METRICS if _OPEN_METRICS in read_header(request.headers, b"accept") else ""
        if accept not in next_pages:
            next_pages[accept] = asyncio.create_task(write_next(accept))
        page, media_type = await asyncio.shield(next_pages[accept])
        return HttpResponse(page, media_type)

    return [(METRICS, metrics)]
