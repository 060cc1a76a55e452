"""tokenizer/packing.py: an encoded input comes back as it was, in half the bytes where its numbers are small."""

import numpy as np
import pytest

from neuronpipe.api.v1.stages_pb2 import EncodedInput
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.tokenizer.packing import pack, unpack


def _encoded(*arrays: list[int]) -> EncodedInput:
    sets = [to_tensor_set({"input_ids": np.array(numbers, np.int32)}) for numbers in arrays]
    return EncodedInput(sequences=sets, annotations=sets, tokens=7, truncated_tokens=2)


@pytest.mark.parametrize(
    "numbers",
    [[101, 2028, 102], [-1, 0, 65_534], [65_535], [-2, 5], [250_001, 2], [2**31 - 1, -(2**31)], []],
    ids=["small", "the limits", "above", "below", "a large vocabulary", "any", "none"],
)
def test_an_encoded_input_comes_back_as_it_was(numbers: list[int]) -> None:
    encoded = _encoded(numbers, numbers)
    assert EncodedInput.FromString(unpack(pack(encoded.SerializeToString()))) == encoded


def test_small_numbers_take_two_bytes() -> None:
    large, small = (pack(_encoded([number] * 1000).SerializeToString()) for number in (70_000, 30_000))
    assert len(large) - len(small) == pytest.approx(4000, abs=20)
