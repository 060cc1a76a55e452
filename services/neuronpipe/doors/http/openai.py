"""OpenAI's embeddings and list of models."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.api.v1.tasks_pb2 import ImageEmbeddingResult, SentenceEmbeddingResult, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.aliases import AliasedBody
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import (
    Body,
    Count,
    KeptTokens,
    Many,
    Part,
    TokenIds,
    either,
    embedding_task,
    fixed,
    only,
)
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.http.unknown_fields import UnknownFields
from neuronpipe.doors.inference import FieldNames, Inference, Inputs, cut_fields, of_results, truncation_of
from neuronpipe.doors.vectors import (
    PRECISIONS,
    VectorTypes,
    base64_of,
    embedding_input,
    embedding_of,
    listed,
    numbers,
    prompt_of_word,
)

_Type = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


@with_fields(
    fixed(add_special_tokens=True, embed_dtype="float32", late_chunking=False, return_multivector=False)
    | fixed(modality="text")
)
class EmbeddingOptions(AliasedBody):
    """OpenAI's fields, and fields of vLLM, Voyage and Jina."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(
        None,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="number of the first dimensions that are kept, scaled to unit length",
    )
    truncate: bool | None = Field(
        None,
        validation_alias=AliasChoices("truncate", "truncation"),
        description="TEI's, Voyage's: whether a text that is too long loses its end, or is an error",
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
    output_dtype: _Type | Annotated[Many[_Type], Field(min_length=1)] = Field(
        "float",
        validation_alias=AliasChoices("output_dtype", "embedding_type"),
        description="Voyage's, Jina's: the numbers of the vectors; binary: eight dimensions in a byte; several: an "
        "object for each vector",
    )
    endianness: Annotated[Any, only("native", "little")] = None

    @property
    def is_base64(self) -> bool:
        """Whether the answer has vectors in Base64."""
        return self.encoding_format == "base64" or self.output_dtype == "base64"


# A text in a list of parts counts as a part.
_PartOrText = Annotated[Part, BeforeValidator(lambda value: {"text": value} if isinstance(value, str) else value)]


class EmbeddingsRequest(EmbeddingOptions):
    input: str | Part | Many[str] | TokenIds | Many[TokenIds] | Many[_PartOrText] = Field(
        description="a text, its token ids, an image, or several"
    )


class EmbeddedMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=1)]


class EmbeddedChat(EmbeddingOptions):
    """vLLM's: a message of a text or an image instead of `input`."""

    messages: Annotated[list[EmbeddedMessage], Field(min_length=1, max_length=1)]

    @property
    def input(self) -> Any:
        """The text, or the part."""
        content = self.messages[0].content
        return content if isinstance(content, str) else content[0]


_VECTOR = Annotated[
    list[float] | str | dict[str, list[float] | str],
    Field(description="numbers, or their bytes, little-endian, in Base64; or both by their types"),
]
_EMBEDDING: Any = named("Embedding", object=Literal["embedding"], index=int, embedding=_VECTOR)
_USAGE = named("EmbeddingsUsage", prompt_tokens=int, total_tokens=int)
_LIST = Literal["list"]
_EMBEDDINGS = named("EmbeddingsResponse", object=_LIST, data=list[_EMBEDDING], model=str, usage=_USAGE)
_ROOT = "`root`: the model that an alias stands for. `type`, `display_name` and `created_at` are Anthropic's."
_NAMES: Any = {"id": str, "root": str, "display_name": str}
_KINDS: Any = dict.fromkeys(("object", "type"), Literal["model"])
_MODEL: Any = named("ModelEntry", _ROOT, **_NAMES, **_KINDS, created=int, created_at=str, owned_by=str)
_EITHER = either(EmbeddingsRequest, EmbeddedChat, {"messages"}, "OpenAI's with `input`, vLLM's with `messages`")
EMBEDDINGS = Route(
    "POST", "/v1/embeddings", "OpenAI: vectors of texts and images", _EITHER, _EMBEDDINGS, error_form=OPENAI_ERROR
)
_get = partial(Route, "GET", error_form=OPENAI_ERROR)
MODELS = _get("/v1/models", "OpenAI: the models", gives=named("ModelList", object=_LIST, data=list[_MODEL]))
MODEL = _get("/v1/models/{name}", "OpenAI: one model", gives=_MODEL)
_FIELDS = {"truncation": "truncate", "precision": "output_dtype", "dimensions": "dimensions"}
# The fields that choose a prompt of the model.
_PROMPT_FIELDS = ("prompt_name", "input_type", "task")
# Fields that only Voyage's requests have, then fields that only Jina's requests have.
_VOYAGES_OR_JINAS = frozenset(
    (
        *("truncation", "output_dimension", "output_dtype"),
        *("embedding_type", "normalized", "late_chunking", "return_multivector"),
    )
)


async def embeddings(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/embeddings."""
    body: EmbeddingsRequest | EmbeddedChat = request.body
    values, is_list = listed(body.input)
    model = inference.choose(request.model(body.model), embedding_task(values))
    spec = inference.spec(model)
    options = _options(body, spec.public_facts.get("prompt_names", ()))
    words = body.output_dtype if isinstance(body.output_dtype, list) else ()
    types = VectorTypes.of(words, spec, body.dimensions, skip_normalize=not body.normalize)
    if words:
        spec.check_answers(embedding_task(values))
    name = "messages[0].content" if isinstance(body, EmbeddedChat) else "input"
    inputs = Inputs(name, values, partial(_input, **options), _fields(body, name), is_list, types.check)
    results = await inference.each(request.call, model, inputs)

    def write() -> bytes:
        vectors = [embedding_of(result.result.message) for result in results]
        tokens = sum(result.usage.tokens for result in results)
        if words:
            written = partial(types.write, is_base64=body.is_base64)
            return write_body(_answer(model.name, map(written, vectors), tokens))
        return write_body(embeddings_answer(body, model.name, vectors, tokens))

    return HttpResponse(await of_results(results, write), is_compressible=not body.is_base64)


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
    if isinstance(body.output_dtype, list):
        raise InvalidInput(body.sent_name("output_dtype"), "must be one type here, not a list")
    options = _options(body, prompt_names)
    return [_input(value, **options) for value in listed(body.input)[0]]


def _input(value: str | list[int] | Part, **options: Any) -> TaskInput:
    return embedding_input(value.value if isinstance(value, Part) else value, **options)


def _fields(body: EmbeddingOptions, name: str) -> FieldNames:
    """Returns the names by which the request sent the fields of an input. `name`: the field with the inputs."""
    prompt_field = next((field for field in _PROMPT_FIELDS if getattr(body, field)), "prompt_name")
    fields = dict.fromkeys(("text", "token_ids", "image"), f"{name}…") | {"prompt_name": prompt_field}
    return body.sent_fields(_FIELDS) | fields


def _options(body: EmbeddingOptions, prompt_names: Sequence[str]) -> dict[str, Any]:
    side, max_tokens = body.truncation_side, body.truncate_prompt_tokens
    cuts = {"truncation": truncation_of(body.truncate, side)} if max_tokens is None else cut_fields(max_tokens, side)
    options: dict[str, Any] = {"dimensions": body.dimensions or 0, "skip_normalize": not body.normalize}
    if isinstance(body.output_dtype, str):
        options["precision"] = PRECISIONS[body.output_dtype]
    else:
        options |= VectorTypes.whole
    return options | {"prompt_name": _prompt_name(body, prompt_names)} | cuts


def _prompt_name(body: EmbeddingOptions, names: Sequence[str]) -> str:
    """Returns the name of the prompt that a request asks for; empty for the default prompt. Raises InvalidInput."""
    named_fields = [name for name in _PROMPT_FIELDS if getattr(body, name)]
    if not named_fields or named_fields == ["prompt_name"]:
        return body.prompt_name or ""
    if named_fields[1:]:
        raise InvalidInput(named_fields[1], f"says the same as {named_fields[0]}; send one of them")
    [field] = named_fields
    # Clients of Voyage and Jina send a word also for a model without prompts, as Cohere's do.
    is_theirs = not body.sent_names.isdisjoint(_VOYAGES_OR_JINAS)
    if not names and is_theirs and UnknownFields.current().ignore(field, is_harmless=True):
        return ""
    return prompt_of_word(field, getattr(body, field), names)


def embeddings_answer(
    body: EmbeddingOptions, model: str, vectors: Sequence[SentenceEmbeddingResult | ImageEmbeddingResult], tokens: int
) -> dict[str, Any]:
    """Returns the answer for write_body. `model`: the caller's name of the model. `tokens`: tokens of all inputs."""

    def written(result: SentenceEmbeddingResult | ImageEmbeddingResult) -> Any:
        return base64_of(result) if body.is_base64 else numbers(result)

    return _answer(model, map(written, vectors), tokens)


def _answer(model: str, embeddings: Iterable[Any], tokens: int) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(embeddings)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entry(name: str, model: Model) -> dict[str, Any]:
    # No manifest says when its bundle was made.
    owner = {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "neuronpipe"}
    kinds = {"object": "model", "type": "model"}
    return {"id": name, "root": model.name, "display_name": name, **kinds, **owner, "tasks": list(model.tasks)}
