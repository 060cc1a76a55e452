"""OpenAI's embeddings and list of models."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput
from neuronpipe.doors.http.bodies import Body, Count, KeptTokens, Many, TokenIds, write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, kept_tokens, of_results
from neuronpipe.doors.vectors import embedding_input, float32_bytes, listed, vector
from neuronpipe.gateway.catalog import Catalog


class EmbeddingsRequest(Body):
    """`user` and other fields of OpenAI's are ignored."""

    model: str | None = None
    input: Annotated[
        str | Many[str] | TokenIds | Many[TokenIds],
        Field(description="a text or texts; or instead of each the ids of the model's own tokenizer"),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(None, description="only the first this many numbers, scaled to length one")
    truncate: bool | None = Field(None, description="TEI's: a text that is too long loses its end, else it is an error")
    truncate_prompt_tokens: KeptTokens | None = Field(None, description="vLLM's: of a text; -1: the same as truncate")


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
    """`root`: the model that an alias stands for."""

    id: str
    root: str
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
_CUTS = {"truncation": "truncate"}


def openai_handlers(
    inference: Inference, choice: ModelChoice, catalog: Catalog, aliases: Mapping[str, str]
) -> dict[str, HttpHandler]:
    """The handlers, by route. `aliases`: names that are listed beside those of models."""

    async def embeddings(request: HttpRequest) -> HttpResponse:
        body: EmbeddingsRequest = request.body
        model = choice.choose(request.model(body.model), "sentence_embedding")
        given, is_list = listed(body.input)
        results = await inference.each(
            request.call,
            model,
            given,
            partial(embedding_input, **_options(body)),
            "input",
            lambda index: dict.fromkeys(("text", "token_ids"), f"input[{index}]" if is_list else "input") | _CUTS,
        )

        def write() -> bytes:
            vectors = [result.result.message.sentence_embedding for result in results]
            tokens = sum(result.usage.tokens for result in results)
            return write_body(embeddings_answer(body, model.name, vectors, tokens))

        return HttpResponse(await of_results(results, write), is_compressible=body.encoding_format != "base64")

    async def models(request: HttpRequest) -> HttpResponse:
        newest = {model.name: model for model in catalog.list_models().models if model.is_default}
        named = {alias: newest[name] for alias, name in aliases.items() if name in newest and alias not in newest}
        data = [_entry(name, model) for name, model in (newest | named).items()]
        return HttpResponse(write_body({"object": "list", "data": data}))

    async def model(request: HttpRequest) -> HttpResponse:
        asked = request.model(request.names["name"])
        found = catalog.get_model(GetModelRequest(**asked._asdict())).model
        return HttpResponse(write_body(_entry(asked.name, found)))

    return {EMBEDDINGS.key: embeddings, MODELS.key: models, MODEL.key: model}


def embeddings_inputs(body: EmbeddingsRequest) -> list[TaskInput]:
    """The inputs of a request."""
    return [embedding_input(text, **_options(body)) for text in listed(body.input)[0]]


def _options(body: EmbeddingsRequest) -> dict[str, Any]:
    kept = -1 if body.truncate and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    return {"dimensions": body.dimensions or 0, **kept_tokens(kept, None)}


def embeddings_answer(
    body: EmbeddingsRequest, model: str, vectors: Sequence[SentenceEmbeddingResult], tokens: int
) -> dict[str, Any]:
    """The answer to a request, for write_body. `model`: as the caller names it. `tokens`: of all inputs."""
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
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entry(name: str, model: Model) -> dict[str, Any]:
    # When a bundle was made is not in its manifest.
    owner = {"created": 0, "owned_by": "neuronpipe"}
    return {"id": name, "root": model.name, "object": "model", **owner, "tasks": list(model.tasks)}
