"""Cohere's vectors of texts and images, in several precisions at once. Cohere's reranking is in rerank.py."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, Count, Many, ModelBody, Part, embedding_task
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import COHERE_ERROR
from neuronpipe.doors.http.unknown_fields import UnknownFields
from neuronpipe.doors.inference import Inference, Inputs, cut_fields, of_results, truncation_of
from neuronpipe.doors.vectors import VectorTypes, embedding_input, embedding_of, prompt_of_word
from neuronpipe.gateway.requests import InferenceResult

_Type = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_SIDES = {"NONE": None, "START": "left", "END": "right"}


class Mixed(Body):
    """Cohere also joins texts and images to one vector; models here take one of them."""

    content: Annotated[list[Part], Field(min_length=1, max_length=1)]


class CohereEmbed(ModelBody):
    """Has one of `texts`, `images` and `inputs`. Long texts lose their ends, as with Cohere."""

    texts: Many[str] | None = None
    images: Many[str] | None = Field(None, description="images in Base64, or as data: URLs")
    inputs: Many[Mixed] | None = Field(None, description="objects with a text or an image")
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] = Field(
        description="the prompt of the model; ignored by a model without prompts"
    )
    embedding_types: Many[_Type] = Field(["float"], min_length=1)
    output_dimension: Count | None = None
    truncate: Literal["NONE", "START", "END"] = Field("END", description="the end of a long text that is dropped")
    max_tokens: Count | None = Field(
        None, description="tokens that are kept of a text; default: all that the model takes"
    )

    @property
    def parts(self) -> tuple[str, list[Part]]:
        """The name of the field with the inputs, and the inputs. Raises InvalidInput."""
        if len({"texts", "images", "inputs"} & self.model_fields_set) != 1:
            raise InvalidInput("texts", "a request must have one of texts, images and inputs")
        if self.texts is not None:
            return "texts", [Part(text=text) for text in self.texts]
        if self.images is not None:
            return "images", [Part(image=image) for image in self.images]
        return "inputs", [mixed.content[0] for mixed in self.inputs or ()]


_VECTORS: Any = dict[str, list[list[float]] | list[list[int]] | list[str]]
_ANSWER = named(
    "CohereEmbeddings", id=str, embeddings=_VECTORS, texts=list[str], response_type=str, meta=dict[str, Any]
)
EMBED = Route("POST", "/v2/embed", "Cohere: vectors of texts and images", CohereEmbed, _ANSWER, error_form=COHERE_ERROR)
_FIELDS = {
    "truncation": "truncate",
    "truncation_tokens": "max_tokens",
    "dimensions": "output_dimension",
    "precision": "embedding_types",
}


async def _embed(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: CohereEmbed = request.body
    name, parts = body.parts
    task = embedding_task(parts)
    model = inference.choose(request.model(body.model), task)
    spec = inference.spec(model)
    spec.check_answers(task)
    prompt_name, cuts = _prompt_name(body, spec), _cuts(body)
    types = VectorTypes.of(body.embedding_types, spec, body.output_dimension)

    def make(part: Part) -> TaskInput:
        return embedding_input(part.value, prompt_name=prompt_name, **types.whole, **cuts)

    inputs = Inputs(name, parts, make, _FIELDS | dict.fromkeys(("text", "image"), f"{name}…"), check=types.check)
    results = await inference.each(request.call, model, inputs)

    def write() -> bytes:
        vectors = [types.write(embedding_of(result.result.message)) for result in results]
        embeddings = {word: [each[word] for each in vectors] for word in types.options}
        answer = {"id": request.call.request_id, "response_type": "embeddings_by_type", "embeddings": embeddings}
        meta = {"api_version": {"version": "2"}, "billed_units": _billed(parts, results)}
        return write_body(answer | {"texts": body.texts or [], "meta": meta})

    return HttpResponse(await of_results(results, write))


ANSWERS: Answers[Inference] = [(EMBED, _embed)]


def _billed(parts: Sequence[Part], results: Sequence[InferenceResult]) -> dict[str, int]:
    """Returns Cohere's units: the tokens of texts, and the number of images."""
    tokens = [result.usage.tokens for part, result in zip(parts, results, strict=True) if part.text is not None]
    units = {"input_tokens": sum(tokens)} if tokens else {}
    images = len(parts) - len(tokens)
    return units | {"images": images} if images else units


def _prompt_name(body: CohereEmbed, spec: ModelSpec) -> str:
    """Returns the name of the prompt. Cohere's clients must send a word for it, also for a model without prompts.

    Raises InvalidInput.
    """
    if body.input_type == "image":
        return ""
    names = spec.public_facts.get("prompt_names", ())
    if not names and UnknownFields.current().ignore("input_type", is_harmless=True):
        return ""
    return prompt_of_word("input_type", body.input_type, names)


def _cuts(body: CohereEmbed) -> Mapping[str, Any]:
    """Returns the fields of a TaskInput that cut a text. Raises InvalidInput."""
    side = _SIDES[body.truncate]
    if body.max_tokens and not side:
        raise InvalidInput("max_tokens", "is for truncate START or END")
    return cut_fields(body.max_tokens or -1, side) if side else {"truncation": truncation_of(False, None)}
