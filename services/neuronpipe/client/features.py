"""Converts the bytes of a result with token vectors to an array."""

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import FeatureExtractionResult, FeatureType, MultiVectorEmbeddingResult

_DTYPES = {
    FeatureType.FEATURE_TYPE_FLOAT32: "<f4",
    FeatureType.FEATURE_TYPE_FLOAT16: "<f2",
    FeatureType.FEATURE_TYPE_INT8: "i1",
}


def to_array(result: FeatureExtractionResult | MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """float32 of the result's shape, from any type of numbers. Raises KeyError for a type of a newer server."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float32)
    if result.scales:
        numbers = numbers.reshape(len(result.scales), -1) * np.array(result.scales, np.float32)[:, np.newaxis]
    return numbers.reshape(tuple(result.shape))
