"""client/task_call.py: bytes to arrays, and options to messages."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import FeatureExtractionResult, FeatureType
from neuronpipe.client.task_call import to_array
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import message_fields


@pytest.mark.parametrize(
    ("number", "data", "scales"),
    [
        (FeatureType.FEATURE_TYPE_FLOAT32, np.array([1, -2, 0, 0.5], "<f4").tobytes(), []),
        (FeatureType.FEATURE_TYPE_FLOAT16, np.array([1, -2, 0, 0.5], "<f2").tobytes(), []),
        (FeatureType.FEATURE_TYPE_INT8, bytes([63, 256 - 126, 0, 127]), [1 / 63, 0.5 / 127]),
    ],
)
def test_every_type_of_number_becomes_float32_of_the_results_shape(
    number: "FeatureType.ValueType", data: bytes, scales: list[float]
) -> None:
    array = to_array(FeatureExtractionResult(data=data, shape=[2, 2], type=number, scales=scales))
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, np.array([[1, -2], [0, 0.5]], np.float32), rtol=1e-6)


def test_one_vector_has_one_axis() -> None:
    result = FeatureExtractionResult(data=bytes([1, 2]), shape=[2], type=FeatureType.FEATURE_TYPE_INT8, scales=[0.5])
    assert to_array(result).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("given", [5, [1], "x", {"five": 1}, {None: 1}])
def test_biases_that_are_not_of_tokens_are_the_callers_mistake(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^options\.logit_bias: must be an object with ids of tokens for names"):
        message_fields({"logit_bias": given})
