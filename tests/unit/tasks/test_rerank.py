"""tasks/rerank.py, with a tokenizer and logits small enough to follow by hand."""

import math
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import RerankInput, RerankResult, ScoreFunction, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.base import EncodedText
from neuronpipe.tasks.rerank import TASK
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec("rerank", max_tokens=6, score_function="none")


def _ranked(*logits: float, model: ModelSpec = _MODEL, **options: Any) -> list[tuple[int, Any]]:
    input = RerankInput(query="q", texts=["t"] * len(logits), **options)
    outputs = [{"logits": np.array([logit], np.float32)} for logit in logits]
    result: RerankResult = TASK.decode(input, model, [], outputs)
    return [(text.index, text.score) for text in result.texts]


def test_each_text_is_a_pair_with_the_query_also_an_empty_one() -> None:
    tokenizer = WordTokenizer("q", "a", "b")
    q, a, b = tokenizer.ids("q a b")
    encoded = encode_checked(TASK, RerankInput(query="q", texts=["a", "b b", ""]), tokenizer, _MODEL)
    pairs = [[CLS, q, SEP, a, SEP], [CLS, q, SEP, b, b, SEP], [CLS, q, SEP, SEP]]
    assert [sequence["input_ids"].tolist() for sequence in encoded.sequences] == pairs
    assert encoded.sequences[0]["token_type_ids"].tolist() == [0, 0, 0, 1, 1]


def test_the_models_prompt_goes_before_the_query_only() -> None:
    tokenizer = WordTokenizer("rank:", "q", "a")
    rank, q, a = tokenizer.ids("rank: q a")
    model = model_spec("rerank", prompt="rank: ")
    (sequence,) = encode_checked(TASK, RerankInput(query="q", texts=["a"]), tokenizer, model).sequences
    assert sequence["input_ids"].tolist() == [CLS, rank, q, SEP, a, SEP]


@pytest.mark.parametrize(
    ("logits", "asked", "expected"),
    [
        pytest.param((0.5, -1, 2), {}, [(2, 2), (0, 0.5), (1, -1)], id="their place in the request is kept"),
        pytest.param((1, 2, 1, 2), {}, [(1, 2), (3, 2), (0, 1), (2, 1)], id="those of equal score stay in order"),
        pytest.param((1, 3, 2), {"top_n": 2}, [(1, 3), (2, 2)], id="only the best where the caller says so"),
    ],
)
def test_texts_are_ordered_by_score(logits: Any, asked: Any, expected: list[tuple[int, float]]) -> None:
    assert _ranked(*logits, **asked) == expected


def test_a_model_without_a_function_of_its_own_has_sigmoid_scores() -> None:
    assert _ranked(0, math.log(3), model=model_spec("rerank")) == [(1, pytest.approx(0.75)), (0, 0.5)]


def test_the_callers_function_wins() -> None:
    assert _ranked(math.log(3), function=ScoreFunction.SCORE_FUNCTION_SIGMOID) == [(0, pytest.approx(0.75))]
    assert _ranked(7, model=model_spec("rerank"), function=ScoreFunction.SCORE_FUNCTION_NONE) == [(0, 7)]


def test_texts_that_sigmoid_cannot_tell_apart_go_by_their_logits() -> None:
    assert _ranked(40, 50, function=ScoreFunction.SCORE_FUNCTION_SIGMOID) == [(1, 1.0), (0, 1.0)]


def test_of_query_and_text_the_longer_loses_tokens() -> None:
    tokenizer = WordTokenizer("q", "a", "b", "c", "d")
    q, a, b = tokenizer.ids("q a b")
    input = RerankInput(query="q", texts=["a b c d"], truncation=Truncation.TRUNCATION_RIGHT)
    encoded = encode_checked(TASK, input, tokenizer, _MODEL)
    assert (encoded.sequences[0]["input_ids"].tolist(), encoded.truncated_tokens) == ([CLS, q, SEP, a, b, SEP], 2)


@pytest.mark.parametrize(
    ("input", "expected"),
    [
        (RerankInput(texts=["a"]), "query: is empty"),
        (RerankInput(query="q"), "texts: 0 texts, must be from 1 to 1024"),
        (RerankInput(query="q", texts=["b"] * 1025), "texts: 1025 texts, must be from 1 to 1024"),
        (RerankInput(query="q\0", texts=["a"]), "query: has the character NUL at position 1"),
        (RerankInput(query="q", texts=["a"], top_n=2), "top_n: 2, there are 1 texts"),
        (RerankInput(query="q", texts=["a"], function=ScoreFunction.ValueType(9)), "function: 9 is not known"),
        (
            RerankInput(query="q", texts=["a"], function=ScoreFunction.SCORE_FUNCTION_SOFTMAX),
            "function: softmax needs several labels, and this model has one; use sigmoid or none",
        ),
        (RerankInput(query="q", texts=["a"], truncation=Truncation.ValueType(9)), "truncation: 9 is not known"),
        (
            RerankInput(query="q", texts=["a", "a b c"]),
            "query and texts[1]: 7 tokens, the model takes 6; set truncation to cut",
        ),
        (
            RerankInput(query="q" * 10_000, texts=["ab"] * 500),
            "query and texts: 500 pairs of 5001000 bytes together, the limit is 1048576",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_input_is_refused_by_its_fields_name(input: RerankInput, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert caught.value.message == expected


def test_texts_of_too_many_tokens_together_are_refused_before_the_last_is_tokenized() -> None:
    class Growing(WordTokenizer):
        texts = 0

        def encode_truncated(self, text: str, text_pair: str | None, **options: Any) -> EncodedText:
            self.texts += 1
            return EncodedText(np.zeros(2, np.int32), np.zeros(2, np.int32), truncated_tokens=600_000)

    tokenizer = Growing()
    input = RerankInput(query="q", texts=["t"] * 9, truncation=Truncation.TRUNCATION_RIGHT)
    problem = r"^input: more than 2097152 tokens in the texts together, which is the limit$"
    with pytest.raises(InvalidInput, match=problem):
        encode_checked(TASK, input, tokenizer, _MODEL)
    assert tokenizer.texts == 4
