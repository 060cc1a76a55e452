"""tasks/feature_extraction.py, with a tokenizer and hidden states small enough to follow by hand."""

import math
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    FeatureExtractionResult,
    FeaturePooling,
    FeatureType,
    TextSpan,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Array
from neuronpipe.tasks.feature_extraction import TASK
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec("feature_extraction", max_tokens=6)
_INT8 = FeatureType.FEATURE_TYPE_INT8
_STATE = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [5, -6, 7, 127]], np.float32)


def _decode(state: Array = _STATE, **options: object) -> FeatureExtractionResult:
    input = FeatureExtractionInput(text="a", **options)  # type: ignore[arg-type]
    result: FeatureExtractionResult = TASK.decode(input, _MODEL, [], [{"last_hidden_state": state}])
    return result


def test_all_token_vectors_are_the_default_as_little_endian_float32() -> None:
    result = _decode()
    assert (list(result.shape), result.type, list(result.scales)) == ([3, 4], FeatureType.FEATURE_TYPE_FLOAT32, [])
    assert result.data[:8] == bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x40])  # 1.0 and 2.0
    np.testing.assert_array_equal(np.frombuffer(result.data, "<f4").reshape(3, 4), _STATE)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (FeaturePooling.FEATURE_POOLING_CLS, [1, 2, 3, 4]),  # of the first token
        (FeaturePooling.FEATURE_POOLING_MEAN, [2, -4 / 3, 10 / 3, 131 / 3]),
    ],
)
def test_vectors_are_pooled_where_asked(pooling: "FeaturePooling.ValueType", expected: list[float]) -> None:
    result = _decode(pooling=pooling)
    assert list(result.shape) == [4]
    np.testing.assert_allclose(np.frombuffer(result.data, "<f4"), expected, rtol=1e-6)


def test_float16_is_rounded_to_nearest() -> None:
    result = _decode(np.array([[1.0, 0.1, -2.0, 2049.0]], np.float32), type=FeatureType.FEATURE_TYPE_FLOAT16)
    # Between 2048 and 4096 float16 has even numbers only, and of two that are as near the one with an even last bit.
    assert np.frombuffer(result.data, "<f2").tolist() == [1.0, 0.0999755859375, -2.0, 2048.0]


def test_int8_has_a_scale_for_each_vector_and_is_within_half_of_it() -> None:
    result = _decode(type=FeatureType.FEATURE_TYPE_INT8)
    numbers = np.frombuffer(result.data, np.int8).reshape(3, 4)
    # The last vector's largest number is 127, so that its scale is one; a vector of zeros has none.
    assert numbers[2].tolist() == [5, -6, 7, 127]
    assert numbers[0].tolist() == [32, 64, 95, 127]
    assert list(result.scales) == [pytest.approx(4 / 127), 0, 1]
    restored = numbers * np.array(result.scales)[:, None]
    assert (np.abs(restored - _STATE) <= np.array(result.scales)[:, None] / 2 + 1e-6).all()


def test_one_pooled_vector_in_int8_has_one_scale() -> None:
    result = _decode(pooling=FeaturePooling.FEATURE_POOLING_CLS, type=_INT8)
    assert (list(result.shape), len(result.data), len(result.scales)) == ([4], 4, 1)


def test_a_number_that_float16_cannot_hold_is_refused_by_both() -> None:
    problem = r"^type: the largest value is 70000, the limit of float16 is 65504; use float32 or int8$"
    with pytest.raises(InvalidInput, match=problem):
        _decode(np.array([[1, 2, 3, -70000]], np.float32), type=FeatureType.FEATURE_TYPE_FLOAT16)


def test_a_pair_is_one_sequence_with_types() -> None:
    tokenizer = WordTokenizer("a", "b")
    a, b = tokenizer.ids("a b")
    (sequence,) = encode_checked(TASK, FeatureExtractionInput(text="a", text_pair="b"), tokenizer, _MODEL).sequences
    assert sequence["input_ids"].tolist() == [CLS, a, SEP, b, SEP]
    assert sequence["token_type_ids"].tolist() == [0, 0, 0, 1, 1]


def test_a_long_text_may_be_cut() -> None:
    input = FeatureExtractionInput(text="a b c d e", truncation=Truncation.TRUNCATION_LEFT)
    encoded = encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert (len(encoded.sequences[0]["input_ids"]), encoded.truncated_tokens) == (6, 1)


def test_token_vectors_that_are_too_large_together_are_refused_with_their_size() -> None:
    model = model_spec("feature_extraction", max_tokens=8192, embedding_dimensions=4096)
    text = "a " * 2046  # 2048 tokens with [CLS] and [SEP]: 32 MiB
    assert encode_checked(TASK, FeatureExtractionInput(text=text), WordTokenizer(), model).sequences
    problem = rf"^text: 2049 tokens have vectors of {2049 * 4096 * 4} bytes together, the limit is {32 * 2**20}$"
    with pytest.raises(InvalidInput, match=problem):
        encode_checked(TASK, FeatureExtractionInput(text=text + "b"), WordTokenizer(), model)


def _spans(*spans: tuple[int, int]) -> list[TextSpan]:
    return [TextSpan(start=start, end=end) for start, end in spans]


def _chunked(text: str, state: Array, **options: object) -> FeatureExtractionResult:
    input = FeatureExtractionInput(text=text, **options)  # type: ignore[arg-type]
    encoded = encode_checked(TASK, input, WordTokenizer(), _MODEL)
    result: FeatureExtractionResult = TASK.decode(
        input, _MODEL, encoded.annotations, [{"last_hidden_state": state[: len(encoded.sequences[0]["input_ids"])]}]
    )
    return result


# [CLS] one two three four [SEP]
_STATES = np.array([[9, 9], [1, 2], [3, 4], [5, 6], [7, 8], [9, 9]], np.float32)


def test_chunks_are_means_of_so_many_tokens_without_the_special_ones() -> None:
    result = _chunked("one two  three four", _STATES, chunk_tokens=3)
    assert list(result.shape) == [2, 2]
    assert np.frombuffer(result.data, "<f4").reshape(2, 2).tolist() == [[3, 4], [7, 8]]
    assert [(chunk.start, chunk.end) for chunk in result.chunks] == [(0, 14), (15, 19)]


def test_chunks_of_the_caller_have_the_tokens_that_end_in_them() -> None:
    result = _chunked("one two  three four", _STATES, chunks=_spans((0, 3), (2, 8), (5, 19)))
    # The second has no part of "three", and of "one" the end.
    assert np.frombuffer(result.data, "<f4").reshape(3, 2).tolist() == [[1, 2], [2, 3], [5, 6]]
    assert [(chunk.start, chunk.end) for chunk in result.chunks] == [(0, 3), (0, 7), (4, 19)]


def test_int8_chunks_have_a_scale_each() -> None:
    result = _chunked("one two three four", _STATES, chunk_tokens=2, type=FeatureType.FEATURE_TYPE_INT8)
    assert (list(result.shape), len(result.data), len(result.scales)) == ([2, 2], 4, 2)


def test_a_cut_text_has_the_chunks_of_what_is_left() -> None:
    result = _chunked("a b c d e", _STATES, chunk_tokens=3, truncation=Truncation.TRUNCATION_LEFT)
    assert [(chunk.start, chunk.end) for chunk in result.chunks] == [(2, 7), (8, 9)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": "a\0"}, "text: has the character NUL at position 1"),
        ({"text_pair": "\0"}, "text_pair: has the character NUL at position 0"),
        ({"pooling": 9}, "pooling: 9 is not known"),
        ({"type": 9}, "type: 9 is not known"),
        ({"truncation": 9}, "truncation: 9 is not known"),
        ({"text": "a b c d e"}, "text: 7 tokens, the model takes 6; set truncation to cut"),
        ({"chunk_tokens": 2, "chunks": _spans((0, 1))}, "chunks: replace chunk_tokens; send one of them"),
        ({"chunk_tokens": 2, "text_pair": "b"}, "chunk_tokens: is for one text; leave out text_pair"),
        (
            {"chunk_tokens": 2, "pooling": FeaturePooling.FEATURE_POOLING_CLS},
            "pooling: the vectors of chunks are means; leave it out",
        ),
        ({"chunks": _spans((0, 1), (1, 4))}, "chunks[1]: is from 1 to 4; the text has 3 characters"),
        ({"chunks": _spans((2, 2))}, "chunks[0]: is from 2 to 2; the text has 3 characters"),
        ({"chunks": _spans((0, 1), (1, 2))}, "chunks[1]: has no token of the text, or none that truncation left"),
        ({"chunks": _spans(*[(0, 1)] * 1025)}, "chunks: 1025 chunks, the limit is 1024"),
        ({"text": "  ", "chunk_tokens": 2}, "text: has no tokens"),
    ],
    ids=str,
)
def test_a_bad_input_is_refused_by_its_fields_name(changes: dict[str, Any], expected: str) -> None:
    input = FeatureExtractionInput(**{"text": "a b", **changes})
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert caught.value.message == expected


@pytest.mark.parametrize("chunk", [(0, 4), (2, 2), (-1, 1)])
def test_chunks_beyond_the_tokens_are_refused_when_they_are_decoded(chunk: tuple[int, int]) -> None:
    places = zip(("first_token", "end_token", "char_start", "char_end"), (*chunk, 0, 1), strict=True)
    annotations = [{name: np.array([value], np.int32) for name, value in places}]
    with pytest.raises(InvalidInput, match=r"^annotations: have chunks beyond the 3 tokens of the text$"):
        TASK.decode(FeatureExtractionInput(text="a"), _MODEL, annotations, [{"last_hidden_state": _STATE}])


def test_chunks_are_a_part_of_what_an_encoding_depends_on() -> None:
    options: list[Any] = [{}, {"chunk_tokens": 1}, {"chunk_tokens": 2}]
    options += [{"chunks": _spans((0, 1))}, {"chunks": _spans((0, 3))}]
    assert len({TASK.traits(FeatureExtractionInput(text="a b", **option)) for option in options}) == len(options)


def test_an_encoding_does_not_depend_on_what_becomes_of_the_vectors() -> None:
    pooled = FeatureExtractionInput(text="a", pooling=FeaturePooling.FEATURE_POOLING_MEAN, type=_INT8)
    assert TASK.traits(pooled) == TASK.traits(FeatureExtractionInput(text="a"))
    assert math.prod(_decode().shape) == 12
