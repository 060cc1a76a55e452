"""Converts the bytes of a result with token vectors to an array."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import (
    EmbeddingPrecision,
    FeatureExtractionResult,
    FeatureType,
    MultiVectorEmbeddingResult,
    SentenceEmbeddingResult,
)

_DTYPES = {
    FeatureType.FEATURE_TYPE_FLOAT32: "<f4",
    FeatureType.FEATURE_TYPE_FLOAT16: "<f2",
    FeatureType.FEATURE_TYPE_INT8: "i1",
}
_PACKED_DTYPES: Mapping["EmbeddingPrecision.ValueType", type[np.int8 | np.uint8]] = {
    EmbeddingPrecision.EMBEDDING_PRECISION_BINARY: np.int8,
    EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY: np.uint8,
    EmbeddingPrecision.EMBEDDING_PRECISION_INT8: np.int8,
    EmbeddingPrecision.EMBEDDING_PRECISION_UINT8: np.uint8,
}


class EmbeddedChunk(NamedTuple):
    """A chunk of a text: its offsets in Unicode code points, the end exclusive, and its vector, float32 [width]."""

    start: int
    end: int
    embedding: NDArray[np.float32]


def chunks_of(result: FeatureExtractionResult) -> Sequence[EmbeddedChunk]:
    """The chunks of a text that was asked for by chunks. Raises KeyError for a type of a newer server."""
    return [
        EmbeddedChunk(span.start, span.end, vector)
        for span, vector in zip(result.chunks, to_array(result), strict=True)
    ]


def vector_of(result: SentenceEmbeddingResult) -> NDArray[Any]:
    """The vector: float32, or int8 or uint8 of a precision with bytes. Raises KeyError for one of a newer server."""
    if result.packed:
        return np.frombuffer(result.packed, _PACKED_DTYPES[result.precision])
    return np.array(result.embedding, np.float32)


def to_array(result: FeatureExtractionResult | MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """float32 of the result's shape, from any type of numbers. Raises KeyError for a type of a newer server."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float32)
    if result.scales:
        numbers = numbers.reshape(len(result.scales), -1) * np.array(result.scales, np.float32)[:, np.newaxis]
    return numbers.reshape(tuple(result.shape))
