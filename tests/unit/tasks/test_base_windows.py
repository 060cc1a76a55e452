"""tasks/base.py, check_windows: what multiplies a text beyond reason is refused before a window of it is made."""

import pytest

from neuronpipe.api.v1.tasks_pb2 import QuestionAnsweringInput, TokenClassificationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks import question_answering, token_classification
from neuronpipe.tasks.base import LocatedText, Window, check_windows
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import WordTokenizer

_ANSWERER = model_spec("question_answering", max_tokens=512)
_TAGGER = model_spec("token_classification", max_tokens=512)


class _NoWindows(WordTokenizer):
    """A tokenizer that must not be asked for windows."""

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """See TextTokenizer."""
        raise AssertionError("windows were made")

    def locate_windows(self, text: str, *, max_tokens: int, overlap_tokens: int) -> list[LocatedText]:
        """See TextTokenizer."""
        raise AssertionError("windows were made")


def test_a_large_overlap_is_refused_by_the_tokens_of_all_windows_before_any_is_made() -> None:
    # 384 less the question and three special tokens leave 380, of which two are new: 1 + (800 - 380) / 2 windows of 384
    # tokens.
    input = QuestionAnsweringInput(question="q", context="a " * 800, window_stride_tokens=378)
    with pytest.raises(InvalidInput) as caught:
        question_answering.encode(input, _NoWindows(), _ANSWERER)
    assert caught.value.message == (
        "context: makes 81024 tokens in 211 windows that advance by 2; "
        "the limit is 65536 where they advance by less than a quarter of a window"
    )


def test_a_long_question_before_every_window_is_refused_like_a_large_overlap() -> None:
    # 370 words leave room for 11, of which 5 overlap by default: 250 windows with 373 tokens of the question, and
    # special ones, each.
    input = QuestionAnsweringInput(question="q " * 370, context="a " * 1500)
    with pytest.raises(InvalidInput, match=r"^context: makes 95995 tokens in 250 windows that advance by 6;"):
        question_answering.encode(input, _NoWindows(), _ANSWERER)


def test_windows_of_a_text_to_tag_are_refused_alike() -> None:
    # Room for 510, of which one is new: 1 + 490 windows of 512.
    input = TokenClassificationInput(text="a " * 1000, window_stride_tokens=509)
    with pytest.raises(InvalidInput, match=r"^text: makes 251392 tokens in 491 windows that advance by 1;"):
        token_classification.encode(input, _NoWindows(), _TAGGER)


def test_a_short_text_may_overlap_as_it_likes_and_the_tokens_are_counted_as_they_are() -> None:
    # 1 + (600 - 380) / 2 windows; 600 + 110 x 378 tokens of the context, and four more in each.
    input = QuestionAnsweringInput(question="q", context="a " * 600, window_stride_tokens=378)
    encoded = question_answering.encode(input, WordTokenizer(), _ANSWERER)
    assert (len(encoded.sequences), sum(len(sequence["input_ids"]) for sequence in encoded.sequences)) == (111, 42_624)


def _check(tokens: int, overlap_tokens: int) -> None:
    check_windows(
        "text", "a " * tokens, WordTokenizer(), window_tokens=402, room_tokens=400, overlap_tokens=overlap_tokens
    )


@pytest.mark.parametrize("overlap_tokens", [0, 1, 128, 200])
def test_windows_that_overlap_by_half_of_their_room_at_most_may_be_1024(overlap_tokens: int) -> None:
    most = overlap_tokens + 1024 * (400 - overlap_tokens)
    _check(most, overlap_tokens)
    problem = rf"^text: makes 1025 windows with an overlap of {overlap_tokens} tokens, the limit is 1024$"
    with pytest.raises(InvalidInput, match=problem):
        _check(most + 1, overlap_tokens)


def test_the_limit_of_tokens_itself_is_allowed() -> None:
    # Each new token is a window of 402; w windows of 399 + w tokens together are 402 w: 163 are 65,526.
    _check(399 + 163, 399)
    with pytest.raises(InvalidInput, match="makes 65928 tokens in 164 windows"):
        _check(399 + 164, 399)


def test_a_text_of_one_window_is_not_repeated_however_long_it_is() -> None:
    check_windows(
        "text", "a " * 99_000, WordTokenizer(), window_tokens=100_002, room_tokens=100_000, overlap_tokens=99_999
    )
