"""stages/tokenizer/encoder.py: encoded inputs are in Redis as they were, and smaller."""

import gc
import os
import tracemalloc

import numpy as np
import pytest

from neuronpipe.core.items import EncodedInput
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.cache.cache import MemoryCache
from neuronpipe.stages.tokenizer.encoder import pack, size_bytes, unpack


def _encoded(*arrays: list[int]) -> EncodedInput:
    sets = [{"input_ids": np.array(numbers, np.int32)} for numbers in arrays]
    return EncodedInput(TensorSets(arrays=sets), TensorSets(arrays=sets), tokens=7, truncated_tokens=2)


@pytest.mark.parametrize(
    "numbers",
    [[101, 2028, 102], [-1, 0, 65_534], [65_535], [-2, 5], [250_001, 2], [2**31 - 1, -(2**31)], []],
    ids=["small", "the limits", "above", "below", "a large vocabulary", "any", "none"],
)
def test_an_encoded_input_comes_back_as_it_was(numbers: list[int]) -> None:
    found = unpack(pack(_encoded(numbers, numbers)))
    for sets in (found.sequences.arrays, found.annotations.arrays):
        assert [(list(arrays), arrays["input_ids"].dtype.name, arrays["input_ids"].tolist()) for arrays in sets] == [
            (["input_ids"], "int32", numbers)
        ] * 2
    assert (found.tokens, found.truncated_tokens) == (7, 2)


def test_pixels_come_back_as_they_were() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    (found,) = unpack(pack(EncodedInput(TensorSets(arrays=[{"pixels": pixels}])))).sequences.arrays
    assert found["pixels"].dtype == np.uint8
    assert (found["pixels"] == pixels).all()


def test_what_was_found_cannot_be_changed() -> None:
    (found,) = unpack(pack(_encoded([1, 2]))).sequences.arrays
    assert not found["input_ids"].flags.writeable


def test_small_numbers_take_two_bytes() -> None:
    large, small = (pack(_encoded([number] * 1000)) for number in (70_000, 30_000))
    assert len(large) - len(small) == pytest.approx(4000, abs=20)


@pytest.mark.parametrize(("sequences", "arrays", "tokens"), [(1, 1, 8), (1, 2, 300), (4, 1, 100), (20, 4, 20)])
def test_a_cache_counts_what_its_values_take(sequences: int, arrays: int, tokens: int) -> None:
    def sets() -> TensorSets:
        return TensorSets(
            arrays=[
                {f"array {number}": np.zeros(tokens, np.int32) for number in range(arrays)} for _ in range(sequences)
            ]
        )

    cache = MemoryCache(1 << 30, size_bytes)
    gc.collect()
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    for _ in range(500):
        cache.put(b"tokens:" + os.urandom(16), EncodedInput(sets(), sets(), 1000, 1000))
    gc.collect()
    held_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    # Names of arrays are made anew here, and tables grow in steps.
    assert cache.size_bytes == pytest.approx(held_bytes, rel=0.15)
