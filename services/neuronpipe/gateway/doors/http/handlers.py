"""All protocols of the HTTP door."""

from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.doors.http import openai
from neuronpipe.gateway.doors.http.exchange import HttpHandler, Route
from neuronpipe.gateway.doors.http.inference import Inference
from neuronpipe.gateway.settings import PipelineSettings

ROUTES: tuple[Route, ...] = (*openai.ROUTES,)


def http_handlers(gateway: Gateway, settings: PipelineSettings) -> dict[str, HttpHandler]:
    """The handlers of all routes, by their keys."""
    inference = Inference(gateway.pipeline, settings.max_batch_items)
    return {**openai.openai_handlers(inference, gateway.catalog)}
