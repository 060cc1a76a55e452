"""bundles/buckets.py: which bucket takes a batch, and what a batch looks like in it."""

import random

import numpy as np
import pytest

from neuronpipe.bundles.buckets import Bucket, BucketPlan, bucket_inputs, cut_bucket, fill_bucket, parse_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ImageSpec


def _plan(*buckets: str) -> BucketPlan:
    return BucketPlan(parse_bucket(text) for text in buckets)


@pytest.mark.parametrize("text", ["8x128", "1x1", "999999x999999"])
def test_a_bucket_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_bucket(text)) == text


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x128", "0x128", "8x0", "-8x128", "8X128", "8x128x2", " 8x128", "8x1e2", "٣x8"]
)
def test_what_is_no_bucket_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SetupError, match=r"must be BATCHxTOKENS.*as in 8x128"):
        parse_bucket(text)


def test_a_length_runs_in_the_shortest_bucket_that_holds_it() -> None:
    plan = _plan("8x128", "1x32", "8x32")
    assert [plan.round_tokens(tokens) for tokens in (1, 32, 33, 128)] == [32, 32, 128, 128]


def test_the_batch_sizes_of_a_length_ascend() -> None:
    assert _plan("8x128", "1x128", "4x32").batches(128) == (1, 8)


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    # 4x32 computes 128 tokens, 1x128 as many: of equals the shorter one.
    [(1, 20, "1x32"), (2, 20, "4x32"), (5, 20, "8x64"), (1, 33, "8x64"), (9, 20, None), (1, 65, None)],
)
def test_a_batch_runs_in_the_bucket_that_computes_least(rows: int, tokens: int, expected: str | None) -> None:
    found = _plan("1x32", "4x32", "8x64").find(rows, tokens)
    assert (found and str(found)) == expected


def test_a_batch_padded_to_its_bucket_runs_in_that_bucket() -> None:
    # The scheduler chooses and pads, and the back end looks up what it is handed.
    seed = 20261121
    generator = random.Random(seed)
    for _ in range(1000):
        plan = _plan(
            *(f"{generator.choice((1, 2, 3, 4, 8, 16))}x{generator.choice((8, 16, 24, 32, 64))}" for _ in range(6))
        )
        rows, tokens = generator.randint(1, 16), generator.randint(1, 64)
        if bucket := plan.find(rows, tokens):
            assert plan.find(rows, bucket.tokens) == bucket, f"seed {seed}"


def test_the_same_bucket_twice_counts_once() -> None:
    assert _plan("8x128", "8x128").buckets == (Bucket(batch=8, tokens=128),)


def test_the_largest_bucket_is_the_longest() -> None:
    assert str(_plan("64x8", "1x128", "8x128", "2x32").largest) == "1x128"


def test_a_bucket_is_filled_with_the_padding_id_and_with_rows_whose_mask_is_not_zero() -> None:
    inputs = {"input_ids": np.array([[5, 6], [7, 1]]), "attention_mask": np.array([[1, 1], [1, 0]])}
    filled = fill_bucket(inputs, Bucket(batch=4, tokens=3), pad_token_id=1)
    assert filled["input_ids"].tolist() == [[5, 6, 1], [7, 1, 1], [5, 6, 1], [5, 6, 1]]
    assert filled["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0]]


def test_images_fill_a_bucket_as_float32_levels_with_copies_of_the_first() -> None:
    pixels = np.arange(2 * 3 * 2 * 4, dtype=np.uint8).reshape(2, 3, 2, 4)
    (filled,) = fill_bucket({"pixels": pixels}, Bucket(batch=3, tokens=5), pad_token_id=1).values()
    assert filled.dtype == np.float32
    assert filled.tolist() == [pixels[0].tolist(), pixels[1].tolist(), pixels[0].tolist()]
    shape, dtype = bucket_inputs(["pixels"], Bucket(batch=3, tokens=5), ImageSpec(resize=(2, 4)))["pixels"]
    assert (list(filled.shape), str(filled.dtype)) == (shape, dtype)


def test_rows_that_filled_a_bucket_are_cut_off_its_outputs() -> None:
    assert cut_bucket({"logits": np.arange(8).reshape(4, 2)}, 2)["logits"].tolist() == [[0, 1], [2, 3]]
