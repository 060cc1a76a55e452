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
    vllm,
)
from neuronpipe.doors.http.exchange import HEALTH_ROUTES, HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.openapi import OPENAPI, openapi_handlers
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import PipelineSettings, parse_aliases

METRICS = Route("GET", "/metrics", "the metrics, for Prometheus", is_counted=False, service="metrics")
DESCRIBED: tuple[Route, ...] = (
    *HEALTH_ROUTES,
    *native.ROUTES,
    *openai.ROUTES,
    *openai_text.ROUTES,
    *openai_responses.ROUTES,
    *rerank.ROUTES,
    *tei.ROUTES,
    *tgi.ROUTES,
    *vllm.ROUTES,
    *huggingface.ROUTES,
    *sagemaker.ROUTES,
    *oip.ROUTES,
    METRICS,
)
ROUTES = (*DESCRIBED, OPENAPI)


def http_handlers(
    inference: Inference,
    models: ModelChoice,
    tensors: TensorService,
    gateway: Gateway,
    pipeline: PipelineSettings,
    telemetry: Telemetry,
) -> dict[str, HttpHandler]:
    """The handlers of all routes, by their keys."""
    catalog = gateway.catalog
    return {
        **native.native_handlers(gateway.pipeline),
        **openai.openai_handlers(inference, models, catalog, parse_aliases(pipeline.model_aliases)),
        **openai_text.openai_text_handlers(inference, models, catalog),
        **openai_responses.openai_responses_handlers(inference, models, catalog),
        **rerank.rerank_handlers(inference, models),
        **tei.tei_handlers(inference, models, catalog, pipeline),
        **tgi.tgi_handlers(inference, models, catalog),
        **vllm.vllm_handlers(inference, models, catalog),
        **huggingface.huggingface_handlers(inference, models, catalog),
        **sagemaker.sagemaker_handlers(inference, models, catalog, gateway.pipeline),
        **oip.oip_handlers(tensors),
        **metrics_handlers(telemetry.write_metrics),
        **openapi_handlers(DESCRIBED),
    }


_PAUSES = 4


def metrics_handlers(write: Callable[[str], tuple[bytes, str]]) -> dict[str, HttpHandler]:
    """The handler, by route. `write`: see Telemetry.

    Pages are written one after the other, with pauses of so many times the time that one takes, as the thread that
    writes holds up the event loop. Those who wait for the same page share it.
    """
    turn, may_begin_s = asyncio.Lock(), 0.0
    next_pages: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def write_next(accept: str) -> tuple[bytes, str]:
        nonlocal may_begin_s
        async with turn:
            await asyncio.sleep(max(0.0, may_begin_s - time.monotonic()))
            del next_pages[accept]  # who comes from now on wants a newer one
            began_s = time.monotonic()
            page = await asyncio.to_thread(write, accept)
            ended_s = time.monotonic()
            may_begin_s = ended_s + _PAUSES * (ended_s - began_s)
        return page

    async def metrics(request: HttpRequest) -> HttpResponse:
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        if accept not in next_pages:
            next_pages[accept] = asyncio.create_task(write_next(accept))
        page, media_type = await asyncio.shield(next_pages[accept])
        return HttpResponse(page, media_type)

    return {METRICS.key: metrics}
