"""tasks/fill_mask.py: a sequence for each mask, and the best tokens in its place."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import FillMaskInput, FillMaskResult, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Arrays
from neuronpipe.tasks.fill_mask import TASK, decode, traits
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MASK = 10  # the first word that the tokenizer knows
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mask_position")
_MODEL = model_spec(
    "fill_mask", max_tokens=8, inputs=_INPUTS, mask_token="[M]", mask_token_id=_MASK, tokens=tuple("uvwxyz")
)


def _tokenizer() -> WordTokenizer:
    return WordTokenizer("[M]", "one", "two")


def test_each_mask_is_a_sequence_of_the_whole_text() -> None:
    encoded = encode_checked(TASK, FillMaskInput(text="one [M] [M]"), _tokenizer(), _MODEL)
    assert [sequence["input_ids"].tolist() for sequence in encoded.sequences] == [[CLS, 11, _MASK, _MASK, SEP]] * 2
    assert [sequence["mask_position"].tolist() for sequence in encoded.sequences] == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert [annotation["place"].tolist() for annotation in encoded.annotations] == [[4, 7], [8, 11]]


@pytest.mark.parametrize(
    ("targets", "ids"),
    # What " two" is made of is the token "two": a byte-level tokenizer spells it "Ġtwo", and results show " two".
    [(["two", "one", "two"], [12, 11]), ([" two"], [12])],
)
def test_targets_are_looked_up_once_each_also_as_results_show_them(targets: list[str], ids: list[int]) -> None:
    encoded = encode_checked(TASK, FillMaskInput(text="[M]", targets=targets), _tokenizer(), _MODEL)
    assert encoded.annotations[0]["target_ids"].tolist() == ids


@pytest.mark.parametrize(
    ("truncation", "text"),
    [(Truncation.TRUNCATION_RIGHT, "[M] a b c d e f g"), (Truncation.TRUNCATION_LEFT, "a b c d e f g [M]")],
)
def test_a_text_is_cut_where_its_masks_stay(truncation: "Truncation.ValueType", text: str) -> None:
    encoded = encode_checked(TASK, FillMaskInput(text=text, truncation=truncation), _tokenizer(), _MODEL)
    (sequence,) = encoded.sequences
    assert sequence["input_ids"][sequence["mask_position"] == 1].tolist() == [_MASK]
    assert (len(sequence["input_ids"]), encoded.truncated_tokens) == (8, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": "one two"}, r"text: has no mask; the mask of this model is \[M\]"),
        ({"text": "[M] " * 17}, "text: 17 masks, the limit is 16"),
        ({"text": "[M] a b c d e f"}, "text: 9 tokens, the model takes 8; set truncation to cut"),
        (
            {"text": "[M] a b c d e [M]", "truncation": Truncation.TRUNCATION_RIGHT},
            "truncation: drops 1 of the text's 2 masks",
        ),
        ({"targets": ["one", "one two"]}, r"targets\[1\]: is not a token of the model's vocabulary"),
        ({"targets": [""]}, r"targets\[0\]: is not a token"),
        ({"targets": ["one"] * 101}, "targets: 101 targets, the limit is 100"),
        ({"top_k": 101}, "top_k: 101, the limit is 100"),
        ({"truncation": 9}, "truncation: 9 is not known"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        encode_checked(TASK, FillMaskInput(**{"text": "[M]", **changes}), _tokenizer(), _MODEL)


# Probabilities of u to z.
_WEIGHTS = {"logits": np.log(np.array([0.04, 0.4, 0.1, 0.3, 0.1, 0.06], np.float32)) + 3}


def _annotation(*target_ids: int) -> Arrays:
    return {"place": np.array([4, 7], np.int32), "target_ids": np.array(target_ids, np.int32)}


def _tokens(result: FillMaskResult) -> list[tuple[str, object, int]]:
    (mask,) = result.masks
    return [(token.token, pytest.approx(token.score, abs=1e-6), token.token_id) for token in mask.tokens]


@pytest.mark.parametrize(
    ("top_k", "targets", "expected"),
    [(2, [], [("v", 0.4, 1), ("x", 0.3, 3)]), (0, [5, 3], [("x", 0.3, 3), ("z", 0.06, 5)])],
    ids=["best of all", "targets"],
)
def test_the_best_tokens_come_first_with_their_probabilities_among_all(
    top_k: int, targets: list[int], expected: list[tuple[str, float, int]]
) -> None:
    assert _tokens(decode(FillMaskInput(top_k=top_k), _MODEL, [_annotation(*targets)], [_WEIGHTS])) == expected


def test_five_tokens_are_given_unless_asked() -> None:
    result = decode(FillMaskInput(), _MODEL, [_annotation()], [_WEIGHTS])
    assert [token.token for token in result.masks[0].tokens[:2]] == ["v", "x"]
    assert len(result.masks[0].tokens) == 5


def test_every_mask_has_its_place() -> None:
    outputs = [_WEIGHTS, {"logits": -_WEIGHTS["logits"]}]
    result = decode(FillMaskInput(top_k=1), _MODEL, [_annotation(), _annotation()], outputs)
    assert [(mask.start, mask.end, mask.tokens[0].token) for mask in result.masks] == [(4, 7, "v"), (4, 7, "u")]


def test_the_encoding_depends_on_the_text_the_targets_and_the_truncation_only() -> None:
    assert traits(FillMaskInput(text="a", top_k=3)) == traits(FillMaskInput(text="a"))
    assert len({traits(FillMaskInput(text="a", targets=targets)) for targets in ([], ["b"], ["b", "c"])}) == 3
