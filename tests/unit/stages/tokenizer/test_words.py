"""words.py: which tokens continue a word."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.stages.tokenizer.words import WordRule

_WORD_PIECE: dict[str, Any] = {"continuing_subword_prefix": "##", "unk_token": "[UNK]", "vocab": {"[UNK]": 7}}
_UNIGRAM: dict[str, Any] = {"unk_id": 3, "vocab": [["<s>", 0.0]]}
_BYTE_LEVEL: dict[str, Any] = {"continuing_subword_prefix": "", "unk_token": None, "vocab": {"a": 0}}


def _continues(
    model: dict[str, Any], text: str, tokens: list[tuple[str, int, int]], ids: list[int] | None = None
) -> list[bool]:
    starts, ends = (np.array([token[column] for token in tokens], np.int32) for column in (1, 2))
    token_ids = np.array(ids or [50] * len(tokens), np.int32)
    answer: list[bool] = (
        WordRule.of_model(model).continues_word(text, token_ids, [token[0] for token in tokens], starts, ends).tolist()
    )
    return answer


def test_a_marked_token_continues_a_word() -> None:
    assert _continues(_WORD_PIECE, "unable!", [("un", 0, 2), ("##able", 2, 6), ("!", 6, 7)]) == [False, True, False]


def test_a_token_for_what_the_vocabulary_lacks_is_a_word() -> None:
    assert _continues(_WORD_PIECE, "ꙮ", [("[UNK]", 0, 1)], [7]) == [False]
    assert _continues(_UNIGRAM, "aꙮ", [("▁a", 0, 1), ("ꙮ", 1, 2)], [9, 3]) == [False, False]


@pytest.mark.parametrize("model", [_UNIGRAM, _BYTE_LEVEL], ids=["unigram", "byte-level"])
def test_without_marks_a_token_continues_a_word_unless_a_space_is_before_it(model: dict[str, Any]) -> None:
    tokens = [("a", 0, 1), ("b", 1, 2), ("c", 3, 4), (" d", 4, 6), ("e", 7, 8)]
    # The last space is not one of ASCII's; transformers' pipeline does not count it as a space either.
    assert _continues(model, "ab c d\u00a0e", tokens) == [False, True, False, False, True]


def test_a_token_behind_the_texts_end_does_no_harm() -> None:
    assert _continues(_UNIGRAM, "a ", [("a", 0, 1), ("▁", 1, 2), ("", 2, 2)]) == [False, False, False]
