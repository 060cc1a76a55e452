"""tasks/tokenization.py: what a tokenizer answers alone, and what is refused."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import ChatMessage, DetokenizationInput, TextGenerationInput, Token, TokenizationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.tokenization import DETOKENIZATION, TOKENIZATION
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec(max_tokens=3)
_A, _FINE, _DAY = 10, 11, 12  # in the order in which the tokenizer meets them


def _result(task: Any, input: Any) -> Any:
    encoded = encode_checked(task, input, WordTokenizer("a", "fine", "day"), _MODEL)
    assert encoded.sequences == []
    return task.decode(type(input)(), _MODEL, encoded.annotations, [])


def test_a_text_longer_than_the_model_takes_becomes_tokens_with_their_places() -> None:
    assert list(_result(TOKENIZATION, TokenizationInput(text="a  fine day")).tokens) == [
        Token(token_id=CLS, text="[CLS]", is_special=True),
        Token(token_id=_A, text="a", start=0, end=1),
        Token(token_id=_FINE, text="fine", start=3, end=7),
        Token(token_id=_DAY, text="day", start=8, end=11),
        Token(token_id=SEP, text="[SEP]", is_special=True),
    ]


def test_special_tokens_are_left_out_where_asked() -> None:
    tokens = _result(TOKENIZATION, TokenizationInput(text="a day", skip_special_tokens=True)).tokens
    assert [(token.token_id, token.is_special) for token in tokens] == [(_A, False), (_DAY, False)]


_CHAT = TextGenerationInput(messages=[ChatMessage(role="user", content="a fine day")])
_WRITER = model_spec("text_generation", max_tokens=4, chat_template="{{ messages }}")


def test_the_tokens_of_a_chat_are_counted_even_if_the_model_takes_fewer() -> None:
    encoded = encode_checked(TOKENIZATION, TokenizationInput(chat=_CHAT), WordTokenizer(), _WRITER)
    assert encoded.sequences == []
    result: Any = TOKENIZATION.decode(TokenizationInput(), _WRITER, encoded.annotations, [])
    assert (result.chat_tokens, list(result.tokens)) == (6, [])  # CLS user: a fine day SEP


def test_a_chat_has_a_key_of_its_own_for_each_day_and_content() -> None:
    other = TextGenerationInput(messages=[ChatMessage(role="user", content="a")])
    inputs = [TokenizationInput(chat=_CHAT), TokenizationInput(chat=other), TokenizationInput(text="a")]
    assert len({TOKENIZATION.traits(input) for input in inputs}) == 3
    assert [TOKENIZATION.reads_date(input) for input in inputs] == [True, True, False]


@pytest.mark.parametrize(
    ("input", "model", "problem"),
    [
        (TokenizationInput(chat=_CHAT), _MODEL, "chat: model 'small' takes none; send a text"),
        (TokenizationInput(chat=_CHAT, text="a"), _WRITER, "chat: cannot be combined with a text"),
        (TokenizationInput(chat=TextGenerationInput(prompt="a")), _WRITER, "messages: is empty"),
        (
            TokenizationInput(chat=TextGenerationInput(messages=[ChatMessage(role="user", content="a\0")])),
            _WRITER,
            r"messages\[0\].content: has the character NUL at position 1",
        ),
    ],
    ids=str,
)
def test_a_chat_that_no_model_reads_is_not_counted(input: Any, model: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{problem}$"):
        TOKENIZATION.check(input, model)


@pytest.mark.parametrize(("skips", "text"), [(False, "[CLS] a day [SEP]"), (True, "a day")])
def test_tokens_become_a_text(skips: bool, text: str) -> None:
    input = DetokenizationInput(token_ids=[CLS, _A, _DAY, SEP], skip_special_tokens=skips)
    assert _result(DETOKENIZATION, input).text == text


@pytest.mark.parametrize(
    ("task", "input", "problem"),
    [
        (TOKENIZATION, TokenizationInput(), "text: is empty"),
        (TOKENIZATION, TokenizationInput(text="a\0"), "text: has the character NUL at position 1"),
        (TOKENIZATION, TokenizationInput(text="a " * 16_383), "text: 16385 tokens, the limit of tokenization is 16384"),
        (DETOKENIZATION, DetokenizationInput(), "token_ids: is empty"),
        (DETOKENIZATION, DetokenizationInput(token_ids=[1000]), "token_ids: the id 1000, the vocabulary has 1000"),
        (
            DETOKENIZATION,
            DetokenizationInput(token_ids=[1] * 16_385),
            "token_ids: 16385 ids, the limit of detokenization is 16384",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(task: Any, input: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{problem}$"):
        _result(task, input)


def test_what_is_answered_otherwise_has_other_traits() -> None:
    tokenized = [TokenizationInput(text="a"), TokenizationInput(text="a", skip_special_tokens=True)]
    assert len({TOKENIZATION.traits(input) for input in tokenized}) == 2
    joined = [
        DetokenizationInput(token_ids=[1]),
        DetokenizationInput(token_ids=[1, 1]),
        DetokenizationInput(token_ids=[1], skip_special_tokens=True),
    ]
    assert len({DETOKENIZATION.traits(input) for input in joined}) == 3
