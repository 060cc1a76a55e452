"""The vector of a text or an image: its options, and how it is cut, scaled and packed."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, write_floats

ResultT = TypeVar("ResultT", bound=Message)


class PromptFacts(TaskFacts):
    """The default prompt, and the prompts that an input may name instead."""

    encoded: ClassVar[tuple[str, ...]] = ("prompt", "prompts")
    public_fields: ClassVar[tuple[str, ...]] = ("prompt_names",)

    prompt: str = Field("", description="text that sentence-transformers puts before every input of this model")
    prompts: Mapping[str, str] = Field({}, description="texts that an input may name instead of the prompt")

    @property
    def prompt_names(self) -> list[str]:
        return sorted(self.prompts)

    def prompt_of(self, name: str) -> str:
        """Returns the prompt of a checked name; an empty name means the default prompt."""
        return self.prompts[name] if name else self.prompt


def check_prompt(name: str, facts: PromptFacts) -> None:
    """Refuses a name if the model has no prompt of this name."""
    if name and name not in facts.prompts:
        prompt_names = ", ".join(facts.prompt_names) or "none"
        raise InvalidInput("prompt_name", f"is none of the model's prompts; they are: {prompt_names}")


# The smallest norm that a vector is divided by, as in torch.nn.functional.normalize.
SMALLEST_NORM = 1e-12
# Fields of inputs that `vectors_result` reads.
VECTOR_OPTIONS = ("dimensions", "skip_normalize", "precision")

_PRECISIONS = frozenset(EmbeddingPrecision.values())
_INTEGERS = (EmbeddingPrecision.EMBEDDING_PRECISION_INT8, EmbeddingPrecision.EMBEDDING_PRECISION_UINT8)
_BINARY = (EmbeddingPrecision.EMBEDDING_PRECISION_BINARY, EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY)


class EmbeddingFacts(PromptFacts):
    """Facts about a model that makes one vector of a text or an image."""

    public_fields = ("embedding_dimensions", "prompt_names")

    embedding_dimensions: int = Field(ge=1)
    lowest: tuple[float, ...] = Field(
        (), description="smallest value of each dimension in calibration vectors of length 1; for int8"
    )
    highest: tuple[float, ...] = ()


def check_dimensions(dimensions: int, model: ModelSpec) -> None:
    """Refuses more dimensions than the model's vectors have."""
    limit = EmbeddingFacts.of(model).embedding_dimensions
    if dimensions > limit:
        raise InvalidInput("dimensions", f"{dimensions}, the model has {limit}")


def check_vector_options(input: Any, model: ModelSpec) -> None:
    """Refuses dimensions and a precision that the model's vectors cannot have."""
    check_dimensions(input.dimensions, model)
    if input.precision not in _PRECISIONS:
        raise InvalidInput("precision", f"{input.precision} is not known")
    word = EmbeddingPrecision.Name(input.precision).removeprefix("EMBEDDING_PRECISION_").lower()
    dimensions = input.dimensions or EmbeddingFacts.of(model).embedding_dimensions
    if input.precision in _BINARY and dimensions % 8:
        raise InvalidInput("precision", f"{word} vectors have a multiple of 8 dimensions, not {dimensions}")
    if input.precision in _INTEGERS:
        if not EmbeddingFacts.of(model).lowest:
            problem = f"the model's bundle has no ranges for {word}; compile it again, if it is one of texts alone"
            raise InvalidInput("precision", problem)
        if input.skip_normalize or dimensions < EmbeddingFacts.of(model).embedding_dimensions:
            raise InvalidInput("precision", f"{word} has the ranges of vectors of length 1 of all dimensions only")


def vector_of(outputs: Arrays) -> Array:
    """Returns the vector among the outputs of a graph for one sequence, float32 [embedding_dimensions]."""
    return outputs["sentence_embedding"] if len(outputs) > 1 else next(iter(outputs.values()))


def normalized(vectors: Array) -> Array:
    """Scales vectors, float32 or float64 [any, dimensions], to length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Array = vectors / np.maximum(lengths, np.float32(SMALLEST_NORM))
    return scaled


def vectors_result(kind: type[ResultT], vectors: Array, input: Any, model: ModelSpec) -> ResultT:
    """Returns a result with vectors, float32 [vectors, embedding_dimensions], converted by the input's options."""
    result: Any = kind()
    vectors = vectors[:, : input.dimensions or None]
    if input.precision in _BINARY:
        # Signed numbers have the highest bit the other way round, which subtracts 128.
        flipped = np.uint8(128 if input.precision == EmbeddingPrecision.EMBEDDING_PRECISION_BINARY else 0)
        result.packed, result.precision = (np.packbits(vectors > 0, axis=1) ^ flipped).tobytes(), input.precision
        return cast(ResultT, result)
    if not input.skip_normalize:
        # One by one, because sums of several vectors at once have other last bits than np.linalg.norm of a vector.
        lengths = np.sqrt(np.array([vector.dot(vector) for vector in vectors]))
        vectors = vectors / np.maximum(lengths, np.float32(SMALLEST_NORM))[:, np.newaxis]
    if input.precision in _INTEGERS:
        check_vector_options(input, model)  # an item may not come from the tokenizer, which checks it
        steps = _steps(vectors, EmbeddingFacts.of(model))
        # Signed numbers have the highest bit the other way round, as above.
        flipped = np.uint8(128 if input.precision == EmbeddingPrecision.EMBEDDING_PRECISION_INT8 else 0)
        result.packed, result.precision = (steps ^ flipped).tobytes(), input.precision
    else:
        write_floats(vectors.astype("<f4", copy=False).tobytes(), result)
    return cast(ResultT, result)


def _steps(vectors: Array, facts: EmbeddingFacts) -> Array:
    """Returns for each number, as uint8, the step of its dimension's range that contains the number. Equals
    quantize_embeddings.
    """
    lowest, highest = (np.array(limits, np.float32) for limits in (facts.lowest, facts.highest))
    sizes = (highest - lowest) / 255
    steps: Array = np.clip(np.floor((vectors - lowest) / np.where(sizes == 0, 1, sizes)), 0, 255).astype(np.uint8)
    return steps
