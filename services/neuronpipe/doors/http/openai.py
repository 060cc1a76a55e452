"""OpenAI's embeddings and list of models."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import Answer, Body, Count, KeptTokens, Many, TokenIds, only, write_body
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, kept_tokens, of_results
from neuronpipe.doors.vectors import embedding_input, float32_bytes, listed, vector
from neuronpipe.gateway.catalog import Catalog


class EmbeddingsRequest(Body):
    """OpenAI's, with fields of vLLM, Voyage and Jina."""

    model: str | None = None
    input: Annotated[
        str | Many[str] | TokenIds | Many[TokenIds],
        Field(description="a text or texts; or instead of each the ids of the model's own tokenizer"),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(
        None,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="only the first this many numbers, scaled to length one",
    )
    truncate: bool | None = Field(
        None,
        validation_alias=AliasChoices("truncate", "truncation"),
        description="TEI's, Voyage's: a text that is too long loses its end, else it is an error",
    )
    truncate_prompt_tokens: KeptTokens | None = Field(None, description="vLLM's: of a text; -1: the same as truncate")
    truncation_side: Literal["left", "right"] | None = None
    normalize: bool = Field(
        True,
        validation_alias=AliasChoices("normalize", "normalized", "use_activation"),
        description="whether vectors have length one",
    )
    prompt_name: str | None = Field(None, description="one of the model's prompts instead of its default")
    input_type: str | None = Field(None, description="Voyage's, Cohere's: a prompt of the model that stands for it")
    task: str | None = Field(None, description="Jina's: the same")
    add_special_tokens: Annotated[Any, only(True)] = None
    output_dtype: Annotated[Any, only("float")] = None
    embedding_type: Annotated[Any, only("float")] = None
    embed_dtype: Annotated[Any, only("float32")] = None
    endianness: Annotated[Any, only("native", "little")] = None
    late_chunking: Annotated[Any, only(False)] = None
    return_multivector: Annotated[Any, only(False)] = None
    modality: Annotated[Any, only("text")] = None


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="numbers, or float32 little-endian in Base64")]


class EmbeddingsUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ModelEntry(Answer):
    """`root`: the model that an alias stands for."""

    id: str
    root: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelEntry]


EMBEDDINGS = Route(
    "POST", "/v1/embeddings", "OpenAI: vectors of texts", EmbeddingsRequest, EmbeddingsResponse, OPENAI_ERROR
)
MODELS = Route("GET", "/v1/models", "OpenAI: the models", gives=ModelList, error_form=OPENAI_ERROR)
MODEL = Route("GET", "/v1/models/{name}", "OpenAI: one model", gives=ModelEntry, error_form=OPENAI_ERROR)
_CUTS = {"truncation": "truncate"}
# Names of prompts in the words of Voyage, Cohere and Jina: for a text to find others by, and for a text to be found.
_QUERY = dict.fromkeys(("query", "search_query", "retrieval.query"), "query")
_DOCUMENT = ("document", "passage", "corpus")
_FOUND = (*_DOCUMENT, "search_document", "retrieval.passage")


def openai_handlers(
    inference: Inference, choice: ModelChoice, catalog: Catalog, aliases: Mapping[str, str]
) -> HttpHandlers:
    """The routes with their handlers. `aliases`: names that are listed beside the names of models."""

    async def embeddings(request: HttpRequest) -> HttpResponse:
        body: EmbeddingsRequest = request.body
        model = choice.choose(request.model(body.model), "sentence_embedding")
        given, is_list = listed(body.input)
        results = await inference.each(
            request.call,
            model,
            given,
            partial(embedding_input, **_options(body, catalog.spec(*model).told_facts.get("prompt_names", ()))),
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

    return [(EMBEDDINGS, embeddings), (MODELS, models), (MODEL, model)]


def embeddings_inputs(body: EmbeddingsRequest, prompt_names: Sequence[str]) -> list[TaskInput]:
    """The inputs of a request to a model with these prompts. Raises InvalidInput."""
    options = _options(body, prompt_names)
    return [embedding_input(text, **options) for text in listed(body.input)[0]]


def _options(body: EmbeddingsRequest, prompt_names: Sequence[str]) -> dict[str, Any]:
    kept = -1 if body.truncate and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    options = {"dimensions": body.dimensions or 0, "skip_normalize": not body.normalize}
    return options | {"prompt_name": _prompt_name(body, prompt_names)} | kept_tokens(kept, body.truncation_side)


def _prompt_name(body: EmbeddingsRequest, names: Sequence[str]) -> str:
    """The prompt that a request asks for in one way or another; empty for the model's default. As with
    sentence-transformers, a document of a model that has a prompt for queries alone has the default.

    Raises InvalidInput.
    """
    given = [name for name in ("prompt_name", "input_type", "task") if getattr(body, name)]
    if not given or given == ["prompt_name"]:
        return body.prompt_name or ""
    if given[1:]:
        raise InvalidInput(given[1], f"says the same as {given[0]}; send one of them")
    word = getattr(body, given[0])
    wanted = (word, *(_DOCUMENT if word in _FOUND else (_QUERY.get(word, word),)))
    known = {name.lower(): name for name in names}
    if found := next((known[one.lower()] for one in wanted if one.lower() in known), None):
        return found
    if word in _FOUND and any("query" in name for name in known):
        return ""
    raise InvalidInput(given[0], f"is none of the model's prompts; they are: {', '.join(names) or 'none'}")


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
