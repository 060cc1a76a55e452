"""tasks/zero_shot_classification.py, with a tokenizer and logits small enough to follow by hand."""

import math
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import Truncation, ZeroShotClassificationInput, ZeroShotClassificationResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.zero_shot_classification import TASK
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

# contradiction, neutral, entailment
_MODEL = model_spec("zero_shot_classification", max_tokens=9, entailment_id=2)
_LN_3 = math.log(3)


def _ranked(*logits: list[float], model: ModelSpec = _MODEL, multi_label: bool = False) -> list[tuple[str, Any]]:
    labels = ["a", "b", "c"][: len(logits)]
    input = ZeroShotClassificationInput(text="t", candidate_labels=labels, multi_label=multi_label)
    outputs = [{"logits": np.array(row, np.float32)} for row in logits]
    result: ZeroShotClassificationResult = TASK.decode(input, model, [], outputs)
    return [(label.label, label.score) for label in result.labels]


def test_each_label_is_a_pair_of_the_text_and_its_hypothesis() -> None:
    tokenizer = WordTokenizer("t", "This", "example", "is", "a.", "b.")
    t, this, example, is_, a, b = tokenizer.ids("t This example is a. b.")
    input = ZeroShotClassificationInput(text="t", candidate_labels=["a", "b"])
    pairs = [sequence["input_ids"].tolist() for sequence in encode_checked(TASK, input, tokenizer, _MODEL).sequences]
    assert pairs == [[CLS, t, SEP, this, example, is_, label, SEP] for label in (a, b)]


def test_the_label_stands_in_the_templates_place() -> None:
    tokenizer = WordTokenizer("t", "about", "a", "indeed")
    ids = tokenizer.ids("about a indeed")
    input = ZeroShotClassificationInput(text="t", candidate_labels=["a"], hypothesis_template="about {} indeed")
    assert encode_checked(TASK, input, tokenizer, _MODEL).sequences[0]["input_ids"].tolist()[3:-1] == ids


@pytest.mark.parametrize(
    ("logits", "multi_label", "expected"),
    [
        # e^0 and e^ln 3 are 1 and 3; the other logits take no part.
        pytest.param(([9, 9, 0], [-9, 0, _LN_3]), False, [("b", 0.75), ("a", 0.25)], id="labels exclude each other"),
        pytest.param(([0, 9, _LN_3], [0, -9, 0]), True, [("a", 0.75), ("b", 0.5)], id="entailment and contradiction"),
        pytest.param(([_LN_3, 9, 0],), False, [("a", 0.25)], id="one label, as many"),
        pytest.param(([0, 0, 1000], [0, 0, 1000]), False, [("a", 0.5), ("b", 0.5)], id="beyond what exp can bear"),
    ],
)
def test_scores_are_probabilities_best_first(
    logits: list[list[float]], multi_label: bool, expected: list[tuple[str, float]]
) -> None:
    ranked = _ranked(*logits, multi_label=multi_label)
    assert ranked == [(label, pytest.approx(score)) for label, score in expected]


def test_labels_of_equal_score_stay_in_order() -> None:
    assert [label for label, _ in _ranked([0, 0, 1], [0, 0, 1], [0, 0, 2])] == ["c", "a", "b"]


def test_a_model_that_counts_entailment_first_has_contradiction_last() -> None:
    model = model_spec("zero_shot_classification", entailment_id=0)
    assert _ranked([_LN_3, 9, 0], model=model) == [("a", pytest.approx(0.75))]


@pytest.mark.parametrize(
    ("truncation", "kept"), [(Truncation.TRUNCATION_RIGHT, "p q"), (Truncation.TRUNCATION_LEFT, "r s")]
)
def test_only_the_text_is_cut(truncation: "Truncation.ValueType", kept: str) -> None:
    tokenizer = WordTokenizer("p", "q", "r", "s", "it", "is", "so", "a")
    kept_ids, hypothesis_ids = tokenizer.ids(kept), tokenizer.ids("it is so a")
    input = ZeroShotClassificationInput(
        text="p q r s", candidate_labels=["a", "a"], hypothesis_template="it is so {}", truncation=truncation
    )
    encoded = encode_checked(TASK, input, tokenizer, _MODEL)
    pairs = [sequence["input_ids"].tolist() for sequence in encoded.sequences]
    assert pairs == [[CLS, *kept_ids, SEP, *hypothesis_ids, SEP]] * 2
    assert encoded.truncated_tokens == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": "t\0"}, "text: has the character NUL at position 1"),
        ({"candidate_labels": []}, "candidate_labels: 0 texts, must be from 1 to 1024"),
        ({"candidate_labels": ["a"] * 1025}, "candidate_labels: 1025 texts, must be from 1 to 1024"),
        ({"candidate_labels": ["a", ""]}, "candidate_labels[1]: is empty"),
        ({"candidate_labels": ["a\0"]}, "candidate_labels[0]: has the character NUL at position 1"),
        ({"hypothesis_template": "so"}, "hypothesis_template: must have exactly one {} for the label; it has 0"),
        ({"hypothesis_template": "{} {}"}, "hypothesis_template: must have exactly one {} for the label; it has 2"),
        ({"hypothesis_template": "{label} {}"}, "hypothesis_template: has a brace other than {}"),
        ({"hypothesis_template": "{{}}"}, "hypothesis_template: has a brace other than {}"),
        ({"hypothesis_template": "\0{}"}, "hypothesis_template: has the character NUL at position 0"),
        ({"truncation": 9}, "truncation: 9 is not known"),
        ({"text": "a b c"}, "text and candidate_labels[0]: 10 tokens, the model takes 9; set truncation to cut"),
        (
            {"candidate_labels": ["a", "a b c"], "truncation": Truncation.TRUNCATION_RIGHT},
            "candidate_labels[1]: its hypothesis has 9 tokens, special ones included; the model takes 9 with the text",
        ),
        (
            {"text": "t" * 10_000, "candidate_labels": ["ab"] * 500},
            "text and candidate_labels: 500 pairs of 5001000 bytes together, the limit is 1048576",
        ),
    ],
    ids=str,
)
def test_a_bad_input_is_refused_by_its_fields_name(changes: dict[str, object], expected: str) -> None:
    described: dict[str, object] = {"text": "t", "candidate_labels": ["a"]}
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, ZeroShotClassificationInput(**described | changes), WordTokenizer(), _MODEL)  # type: ignore[arg-type]
    assert caught.value.message == expected


def test_an_encoding_does_not_depend_on_how_scores_are_made() -> None:
    input = ZeroShotClassificationInput(text="t", candidate_labels=["a", "b"])
    other = ZeroShotClassificationInput(text="t", candidate_labels=["a", "b"], multi_label=True)
    assert TASK.traits(input) == TASK.traits(other)
    assert TASK.traits(input) != TASK.traits(ZeroShotClassificationInput(text="t", candidate_labels=["b", "a"]))
