"""tasks/text_classification.py: logits to labels, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TextClassificationInput, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.scores import ScoreFunctionName
from neuronpipe.tasks.text_classification import TASK, decode
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

SOFTMAX, SIGMOID = ScoreFunction.SCORE_FUNCTION_SOFTMAX, ScoreFunction.SCORE_FUNCTION_SIGMOID
NONE = ScoreFunction.SCORE_FUNCTION_NONE
_RIGHT, _LEFT = Truncation.TRUNCATION_RIGHT, Truncation.TRUNCATION_LEFT
_MODEL = model_spec(max_tokens=6)


def _labels(logits: list[float], input: TextClassificationInput, model: ModelSpec = _MODEL) -> list[tuple[str, object]]:
    result = decode(input, model, [], [{"logits": np.array(logits, np.float32)}])
    # Scores are float32 made double: 1e-6 is a few of their last places.
    return [(label.label, pytest.approx(label.score, abs=1e-6)) for label in result.labels]


@pytest.mark.parametrize("truncation", [_RIGHT, _LEFT])
def test_special_tokens_that_leave_no_room_for_text_are_named(truncation: "Truncation.ValueType") -> None:
    input = TextClassificationInput(text="a b", text_pair="c", truncation=truncation)
    problem = "text and text_pair: 3 special tokens leave no room for text, the limit is 3"
    with pytest.raises(InvalidInput, match=problem):
        encode_checked(TASK, input, WordTokenizer(), model_spec(max_tokens=3))


@pytest.mark.parametrize(
    ("function", "logits", "expected"),
    [
        # e^logit is 1, 2 and 5, together 8.
        (SOFTMAX, [0, math.log(2), math.log(5)], [("c", 5 / 8), ("b", 2 / 8), ("a", 1 / 8)]),
        # 1 / (1 + e^-logit): e^-logit is 1, 3 and 1/3.
        (SIGMOID, [0, -math.log(3), math.log(3)], [("c", 3 / 4), ("a", 1 / 2), ("b", 1 / 4)]),
        (NONE, [-1.5, 0, 2.5], [("c", 2.5), ("b", 0), ("a", -1.5)]),
    ],
    ids=["softmax", "sigmoid", "none"],
)
def test_scores_are_those_of_the_function_best_first(
    function: "ScoreFunction.ValueType", logits: list[float], expected: list[tuple[str, float]]
) -> None:
    assert _labels(logits, TextClassificationInput(top_k=3, function=function)) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    # Of log 4 and log 2: softmax 4 / (4 + 2), sigmoid 1 / (1 + 1/4).
    [("softmax", 4 / 6), ("sigmoid", 4 / 5), ("none", math.log(4)), (None, 4 / 6)],
)
def test_unless_asked_the_models_own_function_is_taken_and_softmax_without_one(
    function: ScoreFunctionName | None, expected: float
) -> None:
    facts = {"score_function": function} if function else {}
    model = model_spec(labels=("a", "b"), **facts)
    assert _labels([math.log(4), math.log(2)], TextClassificationInput(), model) == [("a", expected)]


def test_the_function_asked_for_wins_over_the_models_own() -> None:
    model = model_spec(labels=("a", "b"), score_function="none")
    assert _labels([math.log(4), math.log(2)], TextClassificationInput(function=SIGMOID), model) == [("a", 4 / 5)]


@pytest.mark.parametrize("function", [SOFTMAX, SIGMOID])
def test_giant_logits_do_not_overflow(function: "ScoreFunction.ValueType") -> None:
    # float32 exp overflows from 89 on; the warning that it gives fails this test.
    assert _labels([-1000, 1000, -2000], TextClassificationInput(top_k=1, function=function)) == [("b", 1)]


@pytest.mark.parametrize(("asked", "expected"), [({}, ["b"]), ({"top_k": 2}, ["b", "c"])], ids=str)
def test_one_label_is_returned_unless_asked_for_more(asked: Any, expected: list[str]) -> None:
    assert [label for label, _ in _labels([1, 3, 2], TextClassificationInput(**asked))] == expected


def test_labels_of_equal_score_keep_the_models_order() -> None:
    labels = tuple(f"label {number}" for number in range(100))  # few enough, and any sort would keep the order
    result = _labels([0, 1] * 50, TextClassificationInput(top_k=100), model_spec(labels=labels))
    assert [label for label, _ in result] == [*labels[1::2], *labels[::2]]


def test_all_labels_may_be_asked_for() -> None:
    assert len(encode_checked(TASK, TextClassificationInput(text="a", top_k=3), WordTokenizer(), _MODEL).sequences) == 1


def test_a_text_becomes_one_sequence_without_token_types() -> None:
    tokenizer = WordTokenizer()
    (sequence,) = encode_checked(TASK, TextClassificationInput(text="so it is"), tokenizer, _MODEL).sequences
    found = {name: array.tolist() for name, array in sequence.items()}
    assert found == {"input_ids": [CLS, *tokenizer.ids("so it is"), SEP]}


def test_a_pair_becomes_one_sequence_with_token_types() -> None:
    tokenizer = WordTokenizer()
    input = TextClassificationInput(text="so", text_pair="it is")
    (sequence,) = encode_checked(TASK, input, tokenizer, _MODEL).sequences
    assert sequence["input_ids"].tolist() == [CLS, *tokenizer.ids("so"), SEP, *tokenizer.ids("it is"), SEP]
    assert sequence["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_model_without_token_types_gets_none() -> None:
    model = model_spec(inputs=("input_ids", "attention_mask"))
    input = TextClassificationInput(text="so", text_pair="it is")
    (sequence,) = encode_checked(TASK, input, WordTokenizer(), model).sequences
    assert list(sequence) == ["input_ids"]


@pytest.mark.parametrize(
    ("side", "text", "kept"),
    [(_RIGHT, "a b c d e f", "a b c d"), (_LEFT, "a b c d e f", "c d e f"), (_RIGHT, "a b c d", "a b c d")],
    ids=["right", "left", "just fits"],
)
def test_a_long_text_is_cut_on_the_side_asked_for_and_the_loss_is_counted(
    side: "Truncation.ValueType", text: str, kept: str
) -> None:
    tokenizer = WordTokenizer()
    encoded = encode_checked(TASK, TextClassificationInput(text=text, truncation=side), tokenizer, _MODEL)
    assert encoded.sequences[0]["input_ids"].tolist() == [CLS, *tokenizer.ids(kept), SEP]
    assert encoded.truncated_tokens == len(text.split()) - 4


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"text": "a b c d e"}, "text"),
        ({"text": "a b c d e", "truncation": Truncation.TRUNCATION_ERROR}, "text"),
        ({"text": "a b", "text_pair": "c d"}, "text and text_pair"),
    ],
    ids=["unless", "error", "pair"],
)
def test_a_long_text_is_refused_with_both_lengths_unless_it_may_be_cut(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{names}: 7 tokens, the model takes 6; set truncation to cut$"):
        encode_checked(TASK, TextClassificationInput(**fields), WordTokenizer(), _MODEL)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": "", "text_pair": "b"}, "text: is empty"),
        ({"text": "a\0"}, "text: has the character NUL at position 1"),
        ({"text_pair": "😀\0"}, "text_pair: has the character NUL at position 1"),
        ({"top_k": 4}, "top_k: 4, the model has 3 labels"),
        ({"truncation": 9}, "truncation: 9 is not known"),
        ({"function": 9}, "function: 9 is not known"),
    ],
    ids=str,
)
def test_a_bad_input_is_refused_by_its_fields_name(changes: dict[str, object], expected: str) -> None:
    input = TextClassificationInput(text="a")
    for field, value in changes.items():
        setattr(input, field, value)
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert caught.value.message == expected
