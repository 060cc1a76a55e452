"""All protocols of the HTTP door."""

from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.http import (
    huggingface,
    metrics,
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
from neuronpipe.doors.http.exchange import HEALTH_ROUTES, HttpHandler, Route
from neuronpipe.doors.http.openapi import OPENAPI, openapi_handlers
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import PipelineSettings, parse_aliases

DESCRIBED: tuple[Route, ...] = (
    *HEALTH_ROUTES,
    *native.ROUTES,
    *openai.ROUTES,
    *openai_text.ROUTES,
    *openai_responses.ROUTES,
    *rerank.ROUTES,
    *tei.ROUTES,
    *tei.TOKEN_ROUTES,
    *tgi.ROUTES,
    *vllm.ROUTES,
    *huggingface.ROUTES,
    *sagemaker.ROUTES,
    *oip.ROUTES,
    *metrics.ROUTES,
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
        **openai_responses.openai_responses_handlers(inference, models),
        **rerank.rerank_handlers(inference, models),
        **tei.tei_handlers(inference, models, catalog, pipeline),
        **tei.tei_token_handlers(inference, models),
        **tgi.tgi_handlers(inference, models, catalog),
        **vllm.vllm_handlers(inference, models, catalog),
        **huggingface.huggingface_handlers(inference, models, catalog),
        **sagemaker.sagemaker_handlers(inference, models, catalog, gateway.pipeline),
        **oip.oip_handlers(tensors),
        **metrics.metrics_handlers(telemetry.write_metrics),
        **openapi_handlers(DESCRIBED),
    }
