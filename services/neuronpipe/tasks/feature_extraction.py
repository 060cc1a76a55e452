"""Feature extraction: the token vectors of a text or a pair, or one vector pooled from them, as bytes.

The token vectors equal those of transformers' FeatureExtractionPipeline, including those of special tokens.
"""

from typing import Any

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import FeatureExtractionInput, FeatureExtractionResult, FeaturePooling, FeatureType
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, or_default

# Limit for the vectors between the stages, whatever pooling is requested: half of the default message limit.
_MAX_BYTES = 32 << 20

_POOLINGS, _TYPES = frozenset(FeaturePooling.values()), frozenset(FeatureType.values())
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
_LARGEST_INT8 = 127


class FeatureFacts(TaskFacts):
    """Facts about a model that makes a vector of each token."""

    told = ("embedding_dimensions",)

    embedding_dimensions: int = Field(ge=1)


def check(input: FeatureExtractionInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_text("text", input.text)
    if input.text_pair:
        check_text("text_pair", input.text_pair)
    if input.pooling not in _POOLINGS:
        raise InvalidInput("pooling", f"{input.pooling} is not known")
    check_type(input.type)
    check_truncation(input.truncation)


def traits(input: FeatureExtractionInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return input.text, input.text_pair, or_default(input.truncation)


def encode(input: FeatureExtractionInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """One sequence of the text, or of the pair."""
    encoded = encode_text(tokenizer, model, input.text, input.text_pair or None, input.truncation)
    check_vectors_size(len(encoded.sequences[0]["input_ids"]), FeatureFacts.of(model).embedding_dimensions)
    return encoded


def decode(
    input: FeatureExtractionInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> FeatureExtractionResult:
    """The vectors from `last_hidden_state`, float32 [tokens, embedding_dimensions]."""
    vectors = outputs[0]["last_hidden_state"]
    if input.pooling == FeaturePooling.FEATURE_POOLING_CLS:
        vectors = vectors[0]
    elif input.pooling == FeaturePooling.FEATURE_POOLING_MEAN:
        vectors = vectors.mean(axis=0)
    return FeatureExtractionResult(**numbers_of(vectors, input.type))


def check_type(type: "FeatureType.ValueType") -> None:
    """Refuses an unknown data type, which a newer client may send."""
    if type not in _TYPES:
        raise InvalidInput("type", f"{type} is not known")


def check_vectors_size(tokens: int, dimensions: int) -> None:
    """Refuses a text whose token vectors are larger together than what the stages send."""
    size_bytes = tokens * dimensions * np.dtype(np.float32).itemsize
    if size_bytes > _MAX_BYTES:
        raise InvalidInput(
            "text", f"{tokens} tokens have vectors of {size_bytes} bytes together, the limit is {_MAX_BYTES}"
        )


def numbers_of(vectors: Array, type: "FeatureType.ValueType") -> dict[str, Any]:
    """The fields of a result for vectors, float32 [vectors, width] or [width]. Raises InvalidInput."""
    if type == FeatureType.FEATURE_TYPE_INT8:
        numbers, scales = _quantized(vectors)
        return {"data": numbers.tobytes(), "shape": vectors.shape, "type": type, "scales": scales.tolist()}
    if type == FeatureType.FEATURE_TYPE_FLOAT16:
        return {"data": _halved(vectors).tobytes(), "shape": vectors.shape, "type": type}
    data = vectors.astype("<f4", copy=False).tobytes()
    return {"data": data, "shape": vectors.shape, "type": FeatureType.FEATURE_TYPE_FLOAT32}


def _quantized(vectors: Array) -> tuple[Array, Array]:
    """The vectors as int8 of the same shape, and the scale of each vector, float32 [vectors].

    With separate scales, large numbers of one token do not reduce the precision of others.
    """
    scales: Array = np.abs(vectors).max(axis=-1, keepdims=True) / np.float32(_LARGEST_INT8)
    numbers = np.rint(vectors / np.where(scales > 0, scales, np.float32(1)))
    return numbers.clip(-_LARGEST_INT8, _LARGEST_INT8).astype(np.int8), scales.ravel()


def _halved(vectors: Array) -> Array:
    largest = float(np.abs(vectors).max(initial=0))
    if largest > _LARGEST_FLOAT16:
        raise InvalidInput(
            "type",
            f"the largest value is {largest:g}, the limit of float16 is {_LARGEST_FLOAT16:g}; use float32 or int8",
        )
    return vectors.astype("<f2")


TASK = Task("feature_extraction", check, traits, encode, decode, ("pooling", "type"), FeatureFacts)
