"""tasks/token_classification.py: tokens in, entities out.

Logits are logarithms of weights that sum to one, so that a weight is a probability.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import Aggregation, TokenClassificationInput, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Arrays
from neuronpipe.tasks.token_classification import TASK, decode, traits
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

# Labels O, B-PER, I-PER, B-LOC, I-LOC.
_MODEL = model_spec("token_classification", max_tokens=6)
_O, _B_PER, _I_PER, _B_LOC, _I_LOC = range(5)

_NONE, _SIMPLE, _FIRST, _AVERAGE, _MAX = (
    Aggregation.AGGREGATION_NONE,
    Aggregation.AGGREGATION_SIMPLE,
    Aggregation.AGGREGATION_FIRST,
    Aggregation.AGGREGATION_AVERAGE,
    Aggregation.AGGREGATION_MAX,
)

# A token: its place, whether it continues a word, its label, and that label's probability; all other labels share the
# rest.
_Token = tuple[int, int, bool, int, float]


def _window(tokens: Sequence[_Token]) -> tuple[Arrays, Arrays]:
    """Annotations and outputs of [CLS] tokens [SEP], the special ones sure of B-PER."""
    rows = [(-1, -1, False, _B_PER, 0.99), *tokens, (-1, -1, False, _B_PER, 0.99)]
    weights = np.array(
        [[score if label == own else (1 - score) / 4 for label in range(5)] for _, _, _, own, score in rows], np.float32
    )
    annotation = {
        "char_start": np.array([row[0] for row in rows], np.int32),
        "char_end": np.array([row[1] for row in rows], np.int32),
        "continues_word": np.array([row[2] for row in rows], np.int32),
    }
    return annotation, {"logits": np.log(weights)}


def _entities(
    input: TokenClassificationInput, *windows: Sequence[_Token], model: Any = _MODEL
) -> list[tuple[str, object, str, int]]:
    pairs = [_window(window) for window in windows]
    result = decode(input, model, [annotation for annotation, _ in pairs], [output for _, output in pairs])
    return [
        (entity.label, pytest.approx(entity.score, abs=1e-6), entity.text, entity.start) for entity in result.entities
    ]


# "Ann Lee in Rome": Ann and Lee are one person, and Rome has two tokens.
_TEXT = "Ann Lee in Rome"
_TOKENS = [
    (0, 3, False, _B_PER, 0.9),
    (4, 7, False, _I_PER, 0.7),
    (8, 10, False, _O, 0.8),
    (11, 13, False, _B_LOC, 0.6),
    (13, 15, True, _I_PER, 0.8),
]


def _ask(aggregation: "Aggregation.ValueType" = _SIMPLE, **changes: Any) -> TokenClassificationInput:
    return TokenClassificationInput(text=_TEXT, aggregation=aggregation, **changes)


@pytest.mark.parametrize("aggregation", [_NONE, Aggregation.AGGREGATION_UNSPECIFIED])
def test_without_aggregation_every_token_has_its_own_label(aggregation: "Aggregation.ValueType") -> None:
    expected = [("B-PER", 0.9, "Ann", 0), ("I-PER", 0.7, "Lee", 4), ("B-LOC", 0.6, "Ro", 11), ("I-PER", 0.8, "me", 13)]
    assert _entities(_ask(aggregation), _TOKENS) == expected


def test_neighbours_of_one_label_are_one_entity_with_their_mean_score() -> None:
    assert _entities(_ask(), _TOKENS) == [("PER", 0.8, "Ann Lee", 0), ("LOC", 0.6, "Ro", 11), ("PER", 0.8, "me", 13)]


def test_b_begins_a_new_entity_of_the_same_label() -> None:
    tokens = [(0, 3, False, _B_PER, 0.9), (4, 7, False, _B_PER, 0.7)]
    assert _entities(_ask(), tokens) == [("PER", 0.9, "Ann", 0), ("PER", 0.7, "Lee", 4)]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # The first token of Rome says B-LOC 0.6.
        (_FIRST, ("LOC", 0.6, "Rome", 11)),
        # B-LOC (0.6 + 0.05) / 2, I-PER (0.1 + 0.8) / 2.
        (_AVERAGE, ("PER", 0.45, "Rome", 11)),
        # The second token is the surer one.
        (_MAX, ("PER", 0.8, "Rome", 11)),
    ],
)
def test_a_word_has_one_label(aggregation: "Aggregation.ValueType", expected: tuple[object, ...]) -> None:
    assert _entities(_ask(aggregation), _TOKENS)[-1] == expected


@pytest.mark.parametrize("aggregation", [_FIRST, _AVERAGE, _MAX])
def test_a_window_that_begins_within_a_word_begins_with_a_word(aggregation: "Aggregation.ValueType") -> None:
    assert _entities(_ask(aggregation), [(1, 3, True, _I_PER, 0.9)]) == [("PER", 0.9, "nn", 1)]


def test_of_two_equally_sure_tokens_the_first_gives_the_word_its_label() -> None:
    tokens = [(0, 1, False, _B_LOC, 0.75), (1, 3, True, _I_PER, 0.75)]
    assert _entities(_ask(_MAX), tokens) == [("LOC", 0.75, "Ann", 0)]


def test_ignored_labels_are_those_of_the_result() -> None:
    assert [entity[0] for entity in _entities(_ask(ignore_labels=["PER"]), _TOKENS)] == ["O", "LOC"]
    named = [entity[0] for entity in _entities(_ask(_NONE, ignore_labels=["B-PER", "O"]), _TOKENS)]
    assert named == ["I-PER", "B-LOC", "I-PER"]


def test_all_labels_are_kept_where_asked() -> None:
    assert [entity[0] for entity in _entities(_ask(keep_all_labels=True), _TOKENS)] == ["PER", "O", "LOC", "PER"]


def test_labels_without_b_and_i_are_grouped_and_named_by_what_is_behind_the_hyphen() -> None:
    model = model_spec("token_classification", labels=("O", "MISC-LAW", "MISC-ART", "NOUN", "VERB"))
    tokens = [(0, 3, False, 1, 0.9), (4, 7, False, 1, 0.7), (8, 10, False, 2, 0.6)]
    assert _entities(_ask(), tokens, model=model) == [("LAW", 0.8, "Ann Lee", 0), ("ART", 0.6, "in", 8)]


def test_what_two_windows_find_is_given_once_the_longer_or_the_surer() -> None:
    first = [(0, 3, False, _B_PER, 0.9), (11, 13, False, _B_LOC, 0.9)]
    second = [(0, 3, False, _B_PER, 0.95), (4, 7, False, _I_PER, 0.65), (11, 13, False, _B_LOC, 0.95)]
    # Ann Lee is longer than Ann; Ro is surer in the second window.
    assert _entities(_ask(), first, second) == [("PER", 0.8, "Ann Lee", 0), ("LOC", 0.95, "Ro", 11)]


def test_one_window_may_have_overlapping_tokens() -> None:
    # Byte-level tokens of one character have all its place.
    tokens = [(0, 1, False, _B_PER, 0.9), (0, 1, True, _I_PER, 0.9)]
    assert len(_entities(_ask(_NONE), tokens)) == 2


def test_a_text_is_one_sequence_with_the_places_of_its_tokens() -> None:
    input = TokenClassificationInput(text="one -two three")
    encoded = encode_checked(TASK, input, WordTokenizer("one", "-two", "three"), _MODEL)
    (sequence,), (annotation,) = encoded.sequences, encoded.annotations
    assert sequence["input_ids"].tolist() == [CLS, 10, 11, 12, SEP]
    assert annotation["char_start"].tolist() == [-1, 0, 4, 9, -1]
    assert annotation["char_end"].tolist() == [-1, 3, 8, 14, -1]
    assert annotation["continues_word"].tolist() == [0, 0, 1, 0, 0]


_LONG = "a b c d e f g"


@pytest.mark.parametrize(
    ("asked", "starts", "cut"),
    [
        ({"truncation": Truncation.TRUNCATION_RIGHT}, [[0, 2, 4, 6]], 3),
        ({"truncation": Truncation.TRUNCATION_LEFT}, [[6, 8, 10, 12]], 3),
        ({"window_stride_tokens": 1}, [[0, 2, 4, 6], [6, 8, 10, 12]], 0),
    ],
    ids=["right", "left", "windows"],
)
def test_a_long_text_is_cut_on_a_side_or_read_in_overlapping_windows(
    asked: dict[str, Any], starts: list[list[int]], cut: int
) -> None:
    encoded = encode_checked(TASK, TokenClassificationInput(text=_LONG, **asked), WordTokenizer(), _MODEL)
    found = [annotation["char_start"].tolist() for annotation in encoded.annotations]
    assert found == [[-1, *start, -1] for start in starts]
    assert (len(encoded.sequences), encoded.truncated_tokens) == (len(starts), cut)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"text": _LONG},
            "text: 9 tokens, the model takes 6; set truncation to cut, or window_stride_tokens to read all",
        ),
        ({"text": ""}, "text: is empty"),
        ({"text": "a\0"}, "text: has the character NUL at position 1"),
        ({"aggregation": 9}, "aggregation: 9 is not known"),
        ({"truncation": 9}, "truncation: 9 is not known"),
        ({"keep_all_labels": True, "ignore_labels": ["O"]}, "keep_all_labels: cannot be combined with ignore_labels"),
        ({"window_stride_tokens": 4}, "window_stride_tokens: 4, must be less than 4, the tokens of the text"),
        (
            {"window_stride_tokens": 1, "truncation": Truncation.TRUNCATION_LEFT},
            "truncation: cannot be combined with window_stride_tokens",
        ),
        (
            {"window_stride_tokens": 3, "text": "a " * 2000},
            "text: makes 1997 windows with an overlap of 3 tokens, the limit is 1024",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        encode_checked(TASK, TokenClassificationInput(**{"text": "a", **changes}), WordTokenizer(), _MODEL)


@pytest.mark.parametrize("stride", [0, 1])
@pytest.mark.parametrize("aggregation", Aggregation.values())
def test_a_blank_text_has_no_entities(stride: int, aggregation: "Aggregation.ValueType") -> None:
    input = TokenClassificationInput(text=" \n", window_stride_tokens=stride, aggregation=aggregation)
    encoded = encode_checked(TASK, input, WordTokenizer(), _MODEL)
    outputs = [{"logits": np.ones((len(sequence["input_ids"]), 5), np.float32)} for sequence in encoded.sequences]
    assert list(decode(input, _MODEL, encoded.annotations, outputs).entities) == []


def test_the_encoding_depends_on_the_text_the_stride_and_the_truncation_only() -> None:
    assert traits(_ask(_MAX, ignore_labels=["O"])) == traits(_ask())
    others = {traits(_ask(window_stride_tokens=1)), traits(_ask(truncation=Truncation.TRUNCATION_LEFT))}
    assert len(others | {traits(_ask())}) == 3
