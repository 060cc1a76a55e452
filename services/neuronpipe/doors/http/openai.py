"""OpenAI's embeddings and list of models."""

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput
from neuronpipe.doors.http.bodies import Body, Count, Many, TokenIds, write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, of_results
from neuronpipe.doors.vectors import embedding_input, float32_bytes, listed, vector
from neuronpipe.gateway.catalog import Catalog


class EmbeddingsRequest(Body):
    """`user` and other fields of OpenAI's are ignored."""

    model: str
    input: Annotated[
        str | Many[str] | TokenIds | Many[TokenIds],
        Field(description="a text or texts; or in place of each the ids of the model's own tokenizer"),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(None, description="only the first this many numbers, scaled to length one")


class Embedding(Body):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="numbers, or float32 little-endian in Base64")]


class EmbeddingsUsage(Body):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Body):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ModelEntry(Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Body):
    object: Literal["list"]
    data: list[ModelEntry]


EMBEDDINGS = Route(
    "POST", "/v1/embeddings", "OpenAI: vectors of texts", EmbeddingsRequest, EmbeddingsResponse, OPENAI_ERROR
)
MODELS = Route("GET", "/v1/models", "OpenAI: the models", gives=ModelList, error_form=OPENAI_ERROR)
MODEL = Route("GET", "/v1/models/{name}", "OpenAI: one model", gives=ModelEntry, error_form=OPENAI_ERROR)
ROUTES = (EMBEDDINGS, MODELS, MODEL)


def openai_handlers(inference: Inference, catalog: Catalog) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def embeddings(request: HttpRequest) -> HttpResponse:
        body: EmbeddingsRequest = request.body
        given, is_list = listed(body.input)
        results = await inference.each(
            request.call,
            request.model(body.model),
            given,
            partial(embedding_input, dimensions=body.dimensions or 0),
            "input",
            lambda index: dict.fromkeys(("text", "token_ids"), f"input[{index}]" if is_list else "input"),
        )

        def write() -> bytes:
            vectors = [result.result.message.sentence_embedding for result in results]
            return write_body(embeddings_answer(body, vectors, sum(result.usage.tokens for result in results)))

        return HttpResponse(await of_results(results, write), is_compressible=body.encoding_format != "base64")

    async def models(request: HttpRequest) -> HttpResponse:
        newest = [model for model in catalog.list_models().models if model.is_default]
        return HttpResponse(write_body({"object": "list", "data": [_entry(model) for model in newest]}))

    async def model(request: HttpRequest) -> HttpResponse:
        return HttpResponse(
            write_body(
                _entry(catalog.get_model(GetModelRequest(**request.model(request.names["name"])._asdict())).model)
            )
        )

    return {EMBEDDINGS.key: embeddings, MODELS.key: models, MODEL.key: model}


def embeddings_inputs(body: EmbeddingsRequest) -> list[TaskInput]:
    """The inputs of a request."""
    return [embedding_input(text, dimensions=body.dimensions or 0) for text in listed(body.input)[0]]


def embeddings_answer(
    body: EmbeddingsRequest, vectors: Sequence[SentenceEmbeddingResult], tokens: int
) -> dict[str, Any]:
    """The answer to a request, for write_body. `tokens`: of all inputs."""
    is_base64 = body.encoding_format == "base64"
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": b64encode(float32_bytes(one)).decode() if is_base64 else vector(one),
            }
            for index, one in enumerate(vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entry(model: Model) -> dict[str, Any]:
    # When a bundle was made is not in its manifest.
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "neuronpipe", "tasks": list(model.tasks)}
