"""All protocols of the HTTP door."""

from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.doors.http import huggingface, openai, rerank, sagemaker, tei
from neuronpipe.gateway.doors.http.choice import ModelChoice
from neuronpipe.gateway.doors.http.exchange import HEALTH_ROUTES, HttpHandler, Route
from neuronpipe.gateway.doors.http.inference import Inference
from neuronpipe.gateway.doors.http.openapi import OPENAPI, openapi_handlers
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings

_PROTOCOLS: tuple[Route, ...] = (*openai.ROUTES, *rerank.ROUTES, *tei.ROUTES, *huggingface.ROUTES, *sagemaker.ROUTES)
ROUTES = (*HEALTH_ROUTES, *_PROTOCOLS, OPENAPI)


def http_handlers(gateway: Gateway, pipeline: PipelineSettings, http: HttpSettings) -> dict[str, HttpHandler]:
    """The handlers of all routes, by their keys. Raises SetupError for a default model that is not served."""
    inference = Inference(gateway.pipeline, pipeline)
    models = ModelChoice(gateway.catalog, http.http_default_models)
    return {
        **openai.openai_handlers(inference, gateway.catalog),
        **rerank.rerank_handlers(inference, models),
        **tei.tei_handlers(inference, models, gateway.catalog, pipeline),
        **huggingface.huggingface_handlers(inference, models, gateway.catalog),
        **sagemaker.sagemaker_handlers(inference, models, gateway.catalog),
        **openapi_handlers((*HEALTH_ROUTES, *_PROTOCOLS)),
    }
