"""tasks/inputs/kind.py: what may enter a batch, and how."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks.inputs.kind import input_kind
from tests.unit.model_specs import image_spec, image_text_spec, model_spec

_PAD = 7
_SPEC = model_spec(max_tokens=4, vocabulary_size=100, pad_token_id=_PAD)


def _ids(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def _pad(sequences: Sequence[Arrays], padded_tokens: int, spec: ModelSpec) -> dict[str, Array]:
    return input_kind(spec).pad(sequences, padded_tokens)


def _check(arrays: Arrays, spec: ModelSpec) -> None:
    input_kind(spec).check(arrays)


def test_sequences_are_padded_on_the_right_with_the_models_padding_id() -> None:
    batch = _pad([{"input_ids": _ids(11, 12, 13)}, {"input_ids": _ids(21)}], 4, _SPEC)
    assert batch["input_ids"].tolist() == [[11, 12, 13, _PAD], [21, _PAD, _PAD, _PAD]]


def test_the_mask_is_one_on_tokens_and_zero_on_padding() -> None:
    # The second sequence holds the padding id as a token of its own, which must be seen.
    batch = _pad([{"input_ids": _ids(11, 12, 13)}, {"input_ids": _ids(_PAD)}], 4, _SPEC)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_a_mask_that_came_with_a_sequence_is_not_believed() -> None:
    batch = _pad([{"input_ids": _ids(11, 12), "attention_mask": _ids(0, 0)}], 2, _SPEC)
    assert batch["attention_mask"].tolist() == [[1, 1]]


def test_token_types_are_padded_with_zeros_and_are_zero_where_a_sequence_has_none() -> None:
    sequences = [{"input_ids": _ids(11, 12), "token_type_ids": _ids(0, 1)}, {"input_ids": _ids(21, 22, 23)}]
    assert _pad(sequences, 3, _SPEC)["token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_inputs_are_int64_in_the_models_order() -> None:
    spec = model_spec(inputs=("token_type_ids", "attention_mask", "input_ids"))
    batch = _pad([{"input_ids": _ids(11)}], 2, spec)
    expected = [("token_type_ids", "int64"), ("attention_mask", "int64"), ("input_ids", "int64")]
    assert [(name, str(array.dtype)) for name, array in batch.items()] == expected


def test_a_model_gets_no_input_that_it_does_not_take() -> None:
    assert list(_pad([{"input_ids": _ids(11)}], 2, model_spec(inputs=("input_ids",)))) == ["input_ids"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"input_ids": _ids(0)},
        {"input_ids": _ids(99, 0, 99, 0)},
        {"input_ids": _ids(1, 2), "token_type_ids": _ids(0, 1)},
    ],
    ids=["shortest", "longest, with the ends of the vocabulary", "with token types"],
)
def test_a_sound_sequence_is_let_in(arrays: Arrays) -> None:
    _check(arrays, _SPEC)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({}, "input_ids: missing"),
        ({"token_type_ids": _ids(0)}, "input_ids: missing"),
        ({"input_ids": _ids()}, "input_ids: 0 tokens, the model takes 1 to 4"),
        ({"input_ids": _ids(1, 2, 3, 4, 5)}, "input_ids: 5 tokens, the model takes 1 to 4"),
        ({"input_ids": _ids(1, 100)}, "input_ids: ids from 1 to 100, the vocabulary has 100"),
        ({"input_ids": _ids(1, -1)}, "input_ids: ids from -1 to 1, the vocabulary has 100"),
        ({"input_ids": np.array([1], np.int64)}, "input_ids: int64[1], expected int32[1]"),
        ({"input_ids": np.array([1], np.float32)}, "input_ids: float32[1], expected int32[1]"),
        ({"input_ids": np.array([[1, 2]], np.int32)}, "input_ids: int32[1, 2], expected int32[1]"),
        ({"input_ids": np.array(1, np.int32)}, "input_ids: int32[], expected int32[]"),
        ({"input_ids": _ids(1, 2), "token_type_ids": _ids(0)}, "token_type_ids: int32[1], expected int32[2]"),
        (
            {"input_ids": _ids(1), "token_type_ids": np.zeros(1, np.float32)},
            "token_type_ids: float32[1], expected int32[1]",
        ),
        (
            {"input_ids": _ids(1), "pixels": _ids(0)},
            "pixels: the model has no such input, only input_ids, attention_mask, token_type_ids",
        ),
    ],
    ids=str,
)
def test_a_sequence_that_could_harm_its_batch_is_refused(arrays: Arrays, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _check(arrays, _SPEC)
    assert caught.value.message == expected


_IMAGES = image_spec()
_PIXELS = np.arange(3 * 32 * 48, dtype=np.int64).reshape(3, 32, 48).astype(np.uint8)


def test_images_become_a_batch_as_they_are() -> None:
    batch = _pad([{"pixels": _PIXELS}, {"pixels": 255 - _PIXELS}], _IMAGES.max_tokens, _IMAGES)
    assert list(batch) == ["pixels"]
    assert batch["pixels"].dtype == np.uint8
    assert (batch["pixels"] == np.stack([_PIXELS, 255 - _PIXELS])).all()


def test_every_image_counts_as_the_same_tokens() -> None:
    assert input_kind(_IMAGES).tokens_of({"pixels": _PIXELS}) == 6  # 2 x 3 patches
    assert input_kind(_SPEC).tokens_of({"input_ids": _ids(1, 2)}) == 2


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({}, "inputs: 0 arrays, expected one named pixels"),
        ({"pixels": _PIXELS, "input_ids": _ids(1)}, "inputs: 2 arrays, expected one named pixels"),
        ({"input_ids": _ids(1)}, "inputs: 1 arrays, expected one named pixels"),
        ({"pixels": _PIXELS[:, 1:]}, r"pixels: uint8\[3, 31, 48\], expected uint8\[3, 32, 48\]"),
        ({"pixels": _PIXELS.astype(np.int32)}, r"pixels: int32\[3, 32, 48\], expected uint8"),
        ({"pixels": _PIXELS.reshape(-1)}, r"pixels: uint8\[4608\], expected"),
    ],
)
def test_what_is_no_image_of_the_models_size_is_refused(arrays: Arrays, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{problem}"):
        _check(arrays, _IMAGES)


@pytest.mark.parametrize("spec", [_SPEC, _IMAGES], ids=["tokens", "image"])
def test_the_shortest_sequence_may_enter_a_batch(spec: ModelSpec) -> None:
    _check(input_kind(spec).shortest(), spec)


@pytest.mark.parametrize("spec", [_SPEC, _IMAGES], ids=["tokens", "image"])
def test_a_batch_tells_its_rows_and_its_padded_tokens(spec: ModelSpec) -> None:
    kind = input_kind(spec)
    assert kind.shape_of(kind.pad([kind.shortest()] * 3, spec.max_tokens)) == (3, spec.max_tokens)


@pytest.mark.parametrize("spec", [_SPEC, _IMAGES], ids=["tokens", "image"])
def test_batches_of_the_warm_up_differ_in_what_they_compute(spec: ModelSpec) -> None:
    few, many = (rows * tokens for rows, tokens in input_kind(spec).warm_up_shapes())
    assert few < many


def test_images_of_a_model_that_takes_texts_too_count_as_longer_than_any_text() -> None:
    spec = image_text_spec()
    kind = input_kind(spec)
    image, text = kind.shortest(spec.image_length), kind.shortest(spec.max_tokens)
    assert (list(image), list(text)) == (["pixels"], ["input_ids"])
    assert (kind.tokens_of(image), kind.tokens_of(text)) == (17, 1)  # 6 patches, and texts of up to 16 tokens
    images = kind.pad([image] * 3, spec.image_length)
    expected = {"input_ids": (0, 16), "pixels": (3, 3, 32, 48), "places": (3,)}
    assert {name: array.shape for name, array in images.items()} == expected
