"""OpenAI's embeddings and list of models."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.bodies import Count, KeptTokens, ModelBody, TextsOrTokens, fixed, only, write_body
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, Inputs, kept_tokens, of_results
from neuronpipe.doors.vectors import PRECISIONS, base64_of, embedding_input, listed, numbers, prompt_of_word


@with_fields(
    fixed(add_special_tokens=True, embed_dtype="float32", late_chunking=False, return_multivector=False)
    | fixed(modality="text")
)
class EmbeddingsRequest(ModelBody):
    """OpenAI's fields, and fields of vLLM, Voyage and Jina."""

    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(
        None,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="number of the first dimensions that are kept, scaled to unit length",
    )
    truncate: bool | None = Field(
        None,
        validation_alias=AliasChoices("truncate", "truncation"),
        description="TEI's, Voyage's: whether a text that is too long loses its end; default: it is an error",
    )
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="vLLM's: tokens that are kept of a text; -1: the same as truncate"
    )
    truncation_side: Literal["left", "right"] | None = None
    normalize: bool = Field(
        True,
        validation_alias=AliasChoices("normalize", "normalized", "use_activation"),
        description="whether vectors are scaled to unit length",
    )
    prompt_name: str | None = Field(None, description="a prompt of the model instead of its default prompt")
    input_type: str | None = Field(None, description="Voyage's, Cohere's word for a prompt of the model")
    task: str | None = Field(None, description="Jina's word for a prompt of the model")
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] = Field(
        "float",
        validation_alias=AliasChoices("output_dtype", "embedding_type"),
        description="Voyage's, Jina's: the numbers of the vectors; binary: eight dimensions in a byte",
    )
    endianness: Annotated[Any, only("native", "little")] = None


_VECTOR = Annotated[list[float] | str, Field(description="numbers, or their bytes, little-endian, in Base64")]
_EMBEDDING: Any = named("Embedding", object=Literal["embedding"], index=int, embedding=_VECTOR)
_USAGE = named("EmbeddingsUsage", prompt_tokens=int, total_tokens=int)
_LIST = Literal["list"]
_EMBEDDINGS = named("EmbeddingsResponse", object=_LIST, data=list[_EMBEDDING], model=str, usage=_USAGE)
_ROOT = "`root`: the model that an alias stands for."
_MODEL: Any = named("ModelEntry", _ROOT, id=str, root=str, object=Literal["model"], created=int, owned_by=str)
EMBEDDINGS = Route("POST", "/v1/embeddings", "OpenAI: vectors of texts", EmbeddingsRequest, _EMBEDDINGS, OPENAI_ERROR)
_get = partial(Route, "GET", error_form=OPENAI_ERROR)
MODELS = _get("/v1/models", "OpenAI: the models", gives=named("ModelList", object=_LIST, data=list[_MODEL]))
MODEL = _get("/v1/models/{name}", "OpenAI: one model", gives=_MODEL)
_FIELDS = {"text": "input…", "token_ids": "input…", "truncation": "truncate", "precision": "output_dtype"}


async def embeddings(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/embeddings."""
    body: EmbeddingsRequest = request.body
    model = inference.choose(request.model(body.model), "sentence_embedding")
    values, is_list = listed(body.input)
    options = _options(body, inference.catalog.spec(*model).public_facts.get("prompt_names", ()))
    inputs = Inputs("input", values, partial(embedding_input, **options), _FIELDS, is_list)
    results = await inference.each(request.call, model, inputs)

    def write() -> bytes:
        vectors = [result.result.message.sentence_embedding for result in results]
        tokens = sum(result.usage.tokens for result in results)
        return write_body(embeddings_answer(body, model.name, vectors, tokens))

    return HttpResponse(await of_results(results, write), is_compressible=body.encoding_format != "base64")


async def _models(inference: Inference, request: HttpRequest) -> HttpResponse:
    newest = {model.name: model for model in inference.catalog.list_models().models if model.is_default}
    named = {alias: newest[name] for alias, name in inference.aliases.items() if name in newest and alias not in newest}
    data = [_entry(name, model) for name, model in (newest | named).items()]
    return HttpResponse(write_body({"object": "list", "data": data}))


async def _model(inference: Inference, request: HttpRequest) -> HttpResponse:
    named = request.model(request.names["name"])
    described = inference.catalog.get_model(GetModelRequest(**named._asdict())).model
    return HttpResponse(write_body(_entry(named.name, described)))


ANSWERS: Answers[Inference] = [(EMBEDDINGS, embeddings), (MODELS, _models), (MODEL, _model)]


def embeddings_inputs(body: EmbeddingsRequest, prompt_names: Sequence[str]) -> list[TaskInput]:
    """Returns the inputs of a request to a model with these prompts. Raises InvalidInput."""
    options = _options(body, prompt_names)
    return [embedding_input(text, **options) for text in listed(body.input)[0]]


def _options(body: EmbeddingsRequest, prompt_names: Sequence[str]) -> dict[str, Any]:
    max_tokens = -1 if body.truncate and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    options = {"dimensions": body.dimensions or 0, "skip_normalize": not body.normalize}
    options["precision"] = PRECISIONS[body.output_dtype]
    return options | {"prompt_name": _prompt_name(body, prompt_names)} | kept_tokens(max_tokens, body.truncation_side)


def _prompt_name(body: EmbeddingsRequest, names: Sequence[str]) -> str:
    """Returns the name of the prompt that a request asks for; empty for the default prompt. Raises InvalidInput."""
    named_fields = [name for name in ("prompt_name", "input_type", "task") if getattr(body, name)]
    if not named_fields or named_fields == ["prompt_name"]:
        return body.prompt_name or ""
    if named_fields[1:]:
        raise InvalidInput(named_fields[1], f"says the same as {named_fields[0]}; send one of them")
    return prompt_of_word(named_fields[0], getattr(body, named_fields[0]), names)


def embeddings_answer(
    body: EmbeddingsRequest, model: str, vectors: Sequence[SentenceEmbeddingResult], tokens: int
) -> dict[str, Any]:
    """Returns the answer for write_body. `model`: the caller's name of the model. `tokens`: tokens of all inputs."""

    def written(result: SentenceEmbeddingResult) -> Any:
        return base64_of(result) if body.encoding_format == "base64" else numbers(result)

    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": written(result)}
            for index, result in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entry(name: str, model: Model) -> dict[str, Any]:
    # No manifest says when its bundle was made.
    owner = {"created": 0, "owned_by": "neuronpipe"}
    return {"id": name, "root": model.name, "object": "model", **owner, "tasks": list(model.tasks)}
