"""stages/tokenizer/text.py and what tasks cut with it: of every text, what is used and what is dropped is all of it.

Small tokenizers of all kinds, texts of all scripts, and every limit around each text's length. The texts come from a
seed.
"""

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    QuestionAnsweringInput,
    TextClassificationInput,
    TokenClassificationInput,
    Truncation,
)
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from neuronpipe.tasks import question_answering, text_classification, token_classification
from neuronpipe.tasks.base import Side
from tests.models.tokenizers import TRAINED
from tests.oracle.texts import PICKED, generated
from tests.unit.model_specs import model_spec

_SEED = 20261122
_TEXTS = (*PICKED, *generated(_SEED, 12, words=(1, 20)))
_PAIRS = tuple(zip(_TEXTS, (*_TEXTS[7:], *_TEXTS[:7]), strict=True))
_TRUNCATIONS: dict[Side, "Truncation.ValueType"] = {
    "right": Truncation.TRUNCATION_RIGHT,
    "left": Truncation.TRUNCATION_LEFT,
}
_AROUND = range(-3, 3)


@pytest.fixture(scope="module", params=TRAINED)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(TRAINED[request.param](max_tokens=512).backend_tokenizer.to_str(), encoding="utf-8")
    return JsonTokenizer(path.read_bytes())


def _ids(tokenizer: JsonTokenizer, text: str) -> list[int]:
    """A text's tokens without the special ones, of which there is one at either end."""
    ids: list[int] = tokenizer.encode(text).token_ids.tolist()[1:-1]
    return ids


def _limits(tokens: int, special: int) -> list[int]:
    """Every limit around the length of a sequence, the smallest one that holds any text, and one in the middle."""
    limits = {tokens + change for change in _AROUND} | {special + 1, special + 2, (tokens + special) // 2}
    return sorted(limit for limit in limits if limit > special and limit >= 3)


def _spec(task: str, max_tokens: int) -> ModelSpec:
    return model_spec(task, max_tokens=max_tokens)


@pytest.mark.parametrize("side", _TRUNCATIONS)
def test_used_and_dropped_tokens_are_those_of_the_text(tokenizer: JsonTokenizer, side: Side) -> None:
    cases = 0
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        for limit in _limits(len(ids) + 2, 2):
            input = TextClassificationInput(text=text, truncation=_TRUNCATIONS[side])
            encoded = text_classification.encode(input, tokenizer, _spec("text_classification", limit))
            (sequence,) = encoded.sequences
            used = sequence["input_ids"].tolist()
            assert len(used) + encoded.truncated_tokens == len(ids) + 2, (text, limit)
            assert len(used) == min(limit, len(ids) + 2), (text, limit)
            kept = used[1:-1]
            assert kept == (ids[: len(kept)] if side == "right" else ids[len(ids) - len(kept) :]), (text, limit)
            cases += 1
    assert cases > 200


@pytest.mark.parametrize("side", _TRUNCATIONS)
def test_used_and_dropped_tokens_are_those_of_both_texts_of_a_pair(tokenizer: JsonTokenizer, side: Side) -> None:
    special = tokenizer.special_tokens(pair=True)
    between = special - 2
    cases = 0
    for first, second in _PAIRS:
        one, other = _ids(tokenizer, first), _ids(tokenizer, second)
        for limit in _limits(len(one) + len(other) + special, special):
            input = TextClassificationInput(text=first, text_pair=second, truncation=_TRUNCATIONS[side])
            encoded = text_classification.encode(input, tokenizer, _spec("text_classification", limit))
            used = encoded.sequences[0]["input_ids"].tolist()
            assert len(used) + encoded.truncated_tokens == len(one) + len(other) + special, (first, second, limit)
            assert len(used) == min(limit, len(one) + len(other) + special), (first, second, limit)
            assert _is_cut_from(used[1:-1], one, other, between, side), (first, second, limit)
            cases += 1
    assert cases > 200


def _is_cut_from(used: list[int], one: list[int], other: list[int], between: int, side: Side) -> bool:
    """Whether `used` is a beginning (or an end) of one text, special tokens, and one of the other; the longer lost
    tokens first.
    """

    def part(ids: list[int], count: int) -> list[int]:
        return ids[:count] if side == "right" else ids[len(ids) - count :]

    room = len(used) - between
    for count in range(min(len(one), room) + 1):
        rest = room - count
        if rest > len(other) or used[:count] != part(one, count) or used[count + between :] != part(other, rest):
            continue
        # A text that lost tokens is no shorter than the other by more than the one that is odd.
        if (count == len(one) or count >= rest - 1) and (rest == len(other) or rest >= count - 1):
            return True
    return False


@pytest.mark.parametrize("overlap", [1, 2, 7])
def test_windows_hold_every_token_of_the_text_and_overlap_as_asked(tokenizer: JsonTokenizer, overlap: int) -> None:
    cases = 0
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        for limit in _limits(len(ids) + 2, 2 + overlap):
            input = TokenClassificationInput(text=text, window_stride_tokens=overlap)
            encoded = token_classification.encode(input, tokenizer, _spec("token_classification", limit))
            windows = [sequence["input_ids"].tolist()[1:-1] for sequence in encoded.sequences]
            assert all(len(window) <= limit - 2 for window in windows), (text, limit)
            assert [*windows[0], *(token for window in windows[1:] for token in window[overlap:])] == ids, (text, limit)
            assert encoded.truncated_tokens == 0
            cases += 1
    assert cases > 150


def test_windows_of_a_context_hold_every_token_of_it(tokenizer: JsonTokenizer) -> None:
    question, overlap = "Who?", 2
    special = tokenizer.special_tokens(pair=True) + len(_ids(tokenizer, question))
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        for limit in _limits(len(ids) + special, special + overlap):
            input = QuestionAnsweringInput(question=question, context=text, window_stride_tokens=overlap)
            encoded = question_answering.encode(input, tokenizer, _spec("question_answering", limit))
            windows = [sequence["input_ids"].tolist()[special - 1 : -1] for sequence in encoded.sequences]
            assert [*windows[0], *(token for window in windows[1:] for token in window[overlap:])] == ids, (text, limit)


def test_places_of_tokens_hold_the_text_that_they_are_of(tokenizer: JsonTokenizer) -> None:
    for text in _TEXTS:
        located = tokenizer.locate(text)
        is_text = located.char_start >= 0
        starts, ends = located.char_start[is_text], located.char_end[is_text]
        assert (starts <= ends).all(), text
        assert (np.diff(starts) >= 0).all(), text
        assert len(ends) == 0 or ends.max() <= len(text), text
        # Together they leave out nothing but spaces and what normalization drops.
        covered = np.zeros(len(text), bool)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            covered[start:end] = True
        left_out = "".join(
            character for character, is_covered in zip(text, covered.tolist(), strict=True) if not is_covered
        )
        assert not any(character.isalnum() for character in left_out), (text, left_out)
