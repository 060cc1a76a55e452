"""All protocols of the HTTP door, and the metrics on its port."""

import asyncio
import time
from collections.abc import Callable

from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.http import (
    huggingface,
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
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import PipelineSettings, parse_aliases

METRICS = Route("GET", "/metrics", "the metrics, for Prometheus", is_counted=False, service="metrics")


def http_handlers(
    inference: Inference,
    models: ModelChoice,
    tensors: TensorService,
    gateway: Gateway,
    pipeline: PipelineSettings,
    telemetry: Telemetry,
) -> HttpHandlers:
    """Every route that /openapi.json describes, with its handler, except routes of health and of further packages."""
    catalog = gateway.catalog
    texts = openai_text.OpenAiTextDoor(inference, models, catalog).handlers()
    vectors = openai.openai_handlers(inference, models, catalog, parse_aliases(pipeline.model_aliases))
    ranks = rerank.rerank_handlers(inference, models)
    return [
        *native.native_handlers(gateway.pipeline),
        *vectors,
        *texts,
        *openai_responses.openai_responses_handlers(inference, models, catalog),
        *ranks,
        *tei.TeiHttpDoor(inference, models, catalog, pipeline).handlers(),
        *tgi.tgi_handlers(inference, models, catalog),
        *tokens.token_handlers(inference, models, catalog),
        *vllm.vllm_handlers(inference, models, catalog),
        *huggingface.huggingface_handlers(inference, models, catalog),
        *sagemaker.sagemaker_handlers(inference, models, catalog, gateway.pipeline, [*vectors, *texts, *ranks]),
        *oip.OipHttpDoor(tensors).handlers(),
        *metrics_handlers(telemetry.write_metrics),
    ]


_PAUSES = 4
# The format with exemplars, for scrapers that accept it; other scrapers get plain text.
_OPEN_METRICS = "application/openmetrics-text"


def metrics_handlers(write: Callable[[str], tuple[bytes, str]]) -> HttpHandlers:
    """The route with its handler. `write`: see Telemetry.

    Pages are written in turn, with pauses of `_PAUSES` times the duration of the page before, because the thread that
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
        accept = _OPEN_METRICS if _OPEN_METRICS in request.headers.get(b"accept", b"").decode("latin-1") else ""
        if accept not in next_pages:
            next_pages[accept] = asyncio.create_task(write_next(accept))
        page, media_type = await asyncio.shield(next_pages[accept])
        return HttpResponse(page, media_type)

    return [(METRICS, metrics)]
