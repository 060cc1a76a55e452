"""tasks/zero_shot_token_classification.py, with a tokenizer and scores small enough to follow by hand."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import Truncation, ZeroShotTokenClassificationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.zero_shot_token_classification import MAX_LABELS, TASK, WORD_NUMBER
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import WordTokenizer, encode_checked

_RIGHT, _LEFT = Truncation.TRUNCATION_RIGHT, Truncation.TRUNCATION_LEFT
# [CLS] 1, [SEP] 2, <<ENT>> 3, <<SEP>> 4; spans of one or two words.
_MODEL = model_spec("zero_shot_token_classification", max_tokens=14)


def _encode(**fields: Any) -> Any:
    input = ZeroShotTokenClassificationInput(**{"text": "x, y", "candidate_labels": ["a b", "c"]} | fields)
    return encode_checked(TASK, input, WordTokenizer("a", "b", "c", "x", ",", "y", "z"), _MODEL)


def _places(encoded: Any) -> list[tuple[int, int]]:
    (annotation,) = encoded.annotations
    return list(zip(annotation["char_start"].tolist(), annotation["char_end"].tolist(), strict=True))


def test_a_sequence_has_a_mark_before_each_label_and_numbers_of_words() -> None:
    encoded = _encode()
    (arrays,) = encoded.sequences
    a, b, c, x, comma, y = (WordTokenizer("a", "b", "c", "x", ",", "y").token_id(word) for word in "abcx,y")
    assert arrays["input_ids"].tolist() == [1, 3, a, b, 3, c, 4, x, comma, y, 2]
    assert arrays[WORD_NUMBER].tolist() == [0, -1, 0, 0, -2, 0, 0, 1, 2, 3, 0]
    assert _places(encoded) == [(0, 1), (1, 2), (3, 4)]


def test_a_label_that_comes_twice_is_read_once() -> None:
    twice, once = _encode(candidate_labels=["c", "c"]), _encode(candidate_labels=["c"])
    assert twice.sequences[0]["input_ids"].tolist() == once.sequences[0]["input_ids"].tolist()


@pytest.mark.parametrize(
    ("text", "truncation", "places", "dropped"),
    [
        ("x y z x y z x", _RIGHT, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)], 1),
        ("x y z x y z x", _LEFT, [(2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13)], 1),
        ("x y z x y z", Truncation.TRUNCATION_ERROR, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)], 0),
    ],
)
def test_a_long_text_loses_words_at_a_side(
    text: str, truncation: "Truncation.ValueType", places: list[tuple[int, int]], dropped: int
) -> None:
    encoded = _encode(text=text, truncation=truncation)
    assert (_places(encoded), encoded.truncated_tokens) == (places, dropped)
    assert len(encoded.sequences[0]["input_ids"]) == 14


def test_a_text_of_more_words_than_the_model_reads_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(InvalidInput, match="text: 9 words, the model takes 8; set truncation"):
        _encode(text="x " * 9, candidate_labels=["c"])
    assert len(_places(_encode(text="x " * 9, candidate_labels=["c"], truncation=_LEFT))) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": " \n"}, "text: has no words"),
        ({"text": ""}, "text: is empty"),
        ({"candidate_labels": []}, "candidate_labels: 0 texts"),
        ({"candidate_labels": [str(number) for number in range(65)]}, "candidate_labels: 65 labels, the limit is 64"),
        ({"candidate_labels": ["a " * 9]}, "candidate_labels: 13 tokens leave no room for the text, .* takes 14|takes"),
        ({"candidate_labels": ["a " * 12]}, "candidate_labels: 16 tokens leave no room for the text"),
        ({"threshold": 1.0}, "threshold: 1, must be less than 1"),
        ({"threshold": float("nan")}, "threshold: nan, must be less than 1"),
    ],
)
def test_what_cannot_be_read_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _encode(**fields)


# Spans of "x, y" with their logits: first word, last word, label.
_SCORED = {(0, 1, 0): 3.0, (1, 2, 1): 2.0, (1, 1, 0): 1.0, (1, 1, 1): 0.5, (2, 2, 0): -0.5, (2, 3, 0): 9.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("x,", "a")]),
        ({"threshold": 0.3}, [("x,", "a"), ("y", "a")]),
        ({"allow_nested": True}, [("x,", "a"), (",", "a")]),
        ({"allow_nested": True, "multi_label": True}, [("x,", "a"), (",", "a"), (",", "b")]),
    ],
)
def test_the_best_spans_win_over_overlapping_ones(options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    input = ZeroShotTokenClassificationInput(text="x, y", candidate_labels=["a", "b"], **options)
    annotations = [{"char_start": np.array([0, 1, 3], np.int32), "char_end": np.array([1, 2, 4], np.int32)}]
    logits = np.full((8, 2, MAX_LABELS), -9, np.float32)
    logits[:, :, 2:] = 9  # labels that the request does not have
    for (first, last, label), score in _SCORED.items():
        logits[first, last - first, label] = score
    result = TASK.decode(input, _MODEL, annotations, [{"logits": logits}])
    assert [(entity.text, entity.label) for entity in result.entities] == expected
    assert result.entities[0].score == pytest.approx(1 / (1 + np.exp(-3)))
    assert (result.entities[0].start, result.entities[0].end) == (0, 2)


# Logits of the marks of "x, y" in a model of tokens, by word: as the start, the end and the inside of an entity.
_MARKS = {0: (3.0, -1.0, 2.0), 1: (-1.0, 1.5, 0.5), 2: (2.5, 2.0, 4.0)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # A span has the least logit: of "x," that of the comma inside, of "y" that of its end.
        ({}, [("x,", 0.5), ("y", 2.0)]),
        ({"threshold": 0.7}, [("y", 2.0)]),  # 0.62 is the score of the comma inside
        # Each word begins and ends an entity. ", y" overlaps "x," and "x, y" has the comma's logit.
        (
            {"threshold": 0.2, "allow_nested": True},
            [("x,", 0.5), ("x, y", 0.5), ("x", -1.0), (",", -1.0), ("y", 2.0)],
        ),
    ],
)
def test_a_model_of_tokens_finds_spans_with_a_start_an_end_and_words_inside(
    options: dict[str, Any], expected: list[tuple[str, float]]
) -> None:
    entities = _decode_marks(_MARKS, **options).entities
    assert [entity.text for entity in entities] == [text for text, _ in expected]
    scores = [1 / (1 + np.exp(-logit)) for _, logit in expected]
    assert [entity.score for entity in entities] == pytest.approx(scores)


def _decode_marks(marks: dict[int, tuple[float, float, float]], *, words: int = 3, **options: Any) -> Any:
    """Entities of "x, y" repeated, with the logits of marks for the first label; other words and labels have none."""
    text = "x, y" if words == 3 else "x " * words
    places = [(0, 1), (1, 2), (3, 4)] if words == 3 else [(2 * word, 2 * word + 1) for word in range(words)]
    starts, ends = np.array(places, np.int32).T
    logits = np.full((words + 5, 3, MAX_LABELS), -9, np.float32)
    logits[:, :, 2:] = 9  # labels that the request does not have
    for word, values in marks.items():
        logits[word, :, 0] = values
    input = ZeroShotTokenClassificationInput(text=text, candidate_labels=["a", "b"], **options)
    model = model_spec("zero_shot_token_classification", max_tokens=14, max_width=0)
    return TASK.decode(input, model, [{"char_start": starts, "char_end": ends}], [{"logits": logits}])


def test_a_word_outside_ends_a_span_of_a_model_of_tokens() -> None:
    marks = {0: (3.0, -9.0, 3.0), 1: (-9.0, -9.0, -1.0), 2: (-9.0, 3.0, 3.0)}
    assert not _decode_marks(marks).entities
    assert [entity.text for entity in _decode_marks(marks | {1: (-9.0, -9.0, 1.0)}).entities] == ["x, y"]


def test_more_spans_than_a_limit_are_an_error_that_names_the_threshold() -> None:
    words = 800  # 800 * 801 / 2 = 320,400 spans
    with pytest.raises(InvalidInput, match=r"threshold: more than 300000 spans reach 0\.01; raise the threshold"):
        _decode_marks(dict.fromkeys(range(words), (1.0, 1.0, 1.0)), words=words, threshold=0.01)


def test_the_options_of_decoding_do_not_change_the_encoding() -> None:
    plain = ZeroShotTokenClassificationInput(text="x", candidate_labels=["a"])
    other = ZeroShotTokenClassificationInput(text="x", candidate_labels=["a"], threshold=0.1, multi_label=True)
    assert TASK.traits(plain) == TASK.traits(other)
