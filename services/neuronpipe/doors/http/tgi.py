"""The HTTP API of text-generation-inference: /generate and /generate_stream.

Its /v1/chat/completions is OpenAI's, and its / is Hugging Face's.
"""

from typing import Any

from pydantic import Field

from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import Answer, Body, write_body
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.huggingface_bodies import GenerateParameters
from neuronpipe.doors.http.huggingface_texts import answer_tokens, one_text_fields, read_one_prompt, write_text
from neuronpipe.doors.http.problems import TGI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.gateway.catalog import Catalog

_MODEL_PARAMETER = {"model": "the model, where the body names none and several generate text"}


class Generate(Body):
    model: str | None = None
    inputs: str
    parameters: GenerateParameters = GenerateParameters()
    stream: bool | None = Field(None, description="whether the path is /generate_stream")


class Generated(Answer):
    generated_text: str
    details: dict[str, Any] | None = None


class GeneratedToken(Answer):
    index: int
    token: dict[str, Any]
    generated_text: str | None
    details: dict[str, Any] | None


def _post(path: str, summary: str, gives: Any) -> Route:
    return Route("POST", path, f"TGI: {summary}", Generate, gives, TGI_ERROR, query=_MODEL_PARAMETER)


GENERATE = _post("/generate", "continues a text", Generated)
GENERATE_STREAM = _post("/generate_stream", "the same as events, one for each token", GeneratedToken)


def tgi_handlers(inference: Inference, models: ModelChoice, catalog: Catalog) -> HttpHandlers:
    """The routes with their handlers."""

    async def generate(request: HttpRequest) -> HttpResponse:
        body: Generate = request.body
        if body.stream:
            raise InvalidInput("stream", "is not supported; use /generate_stream")
        model = models.choose(request.model(body.model), "text_generation")
        input = read_one_prompt(body.inputs, body, catalog.spec(*model))
        result = await inference.one(request.call, model, input, one_text_fields(body))
        text = result.result.message.text_generation.sequences[0]
        return HttpResponse(write_body(write_text(text, body.inputs, body)))

    async def generate_stream(request: HttpRequest) -> HttpResponse:
        body: Generate = request.body
        spec = catalog.spec(*models.choose(request.model(body.model), "text_generation"))
        return await answer_tokens(inference, request, spec, body, body.inputs)

    return [(GENERATE, generate), (GENERATE_STREAM, generate_stream)]
