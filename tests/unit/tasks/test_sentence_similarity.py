"""tasks/sentence_similarity.py, with a tokenizer and vectors small enough to follow by hand."""

import math

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import SentenceSimilarityInput, SentenceSimilarityResult, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.sentence_similarity import TASK
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec("sentence_similarity", max_tokens=6)


def _scores(*vectors: list[float], dimensions: int = 0) -> list[float]:
    outputs = [{"sentence_embedding": np.array(vector, np.float32)} for vector in vectors]
    input = SentenceSimilarityInput(source="a", texts=["b"] * (len(vectors) - 1), dimensions=dimensions)
    result: SentenceSimilarityResult = TASK.decode(input, _MODEL, [], outputs)
    return list(result.scores)


def test_each_text_is_a_sequence_behind_the_source() -> None:
    tokenizer = WordTokenizer("a", "b", "c")
    a, b, c = tokenizer.ids("a b c")
    encoded = encode_checked(TASK, SentenceSimilarityInput(source="a", texts=["b", "c c"]), tokenizer, _MODEL)
    sequences = [[CLS, a, SEP], [CLS, b, SEP], [CLS, c, c, SEP]]
    assert [sequence["input_ids"].tolist() for sequence in encoded.sequences] == sequences


def test_the_models_prompt_goes_before_every_text() -> None:
    tokenizer = WordTokenizer("find:", "a", "b")
    find, a, b = tokenizer.ids("find: a b")
    model = model_spec("sentence_similarity", prompt="find: ")
    encoded = encode_checked(TASK, SentenceSimilarityInput(source="a", texts=["b"]), tokenizer, model)
    assert [sequence["input_ids"].tolist()[1:-1] for sequence in encoded.sequences] == [[find, a], [find, b]]


def test_dropped_tokens_of_all_texts_are_counted_together() -> None:
    texts, right = ["a", "a b c d e f"], Truncation.TRUNCATION_RIGHT
    input = SentenceSimilarityInput(source="a b c d e", texts=texts, truncation=right)
    assert encode_checked(TASK, input, WordTokenizer(), _MODEL).truncated_tokens == 3


def test_a_score_is_the_cosine_of_the_angle_whatever_the_lengths() -> None:
    source = [3.0, 0, 0, 0]
    expected = [1, -1, 0, math.sqrt(0.5), 0]  # same direction, opposite, at right angles, 45 degrees, and nothing
    found = _scores(source, [5, 0, 0, 0], [-1, 0, 0, 0], [0, 2, 0, 0], [7, 0, 0, 7], [0, 0, 0, 0])
    assert found == pytest.approx(expected)


def test_the_cosine_of_equal_vectors_is_exactly_1() -> None:
    generator = np.random.default_rng(seed=0)
    for dimensions in (4, 384):
        for _ in range(100):
            vector = generator.standard_normal(dimensions).tolist()
            assert _scores(vector, vector, [3 * value for value in vector]) == [1, 1]


def test_only_the_first_dimensions_are_compared_where_the_caller_says_so() -> None:
    assert _scores([1, 0, 9, 9], [2, 0, -9, 9], dimensions=2) == pytest.approx([1])


@pytest.mark.parametrize(
    ("input", "expected"),
    [
        (SentenceSimilarityInput(source="a"), "texts: 0 texts, must be from 1 to 1024"),
        (SentenceSimilarityInput(source="a", texts=["b"] * 1025), "texts: 1025 texts, must be from 1 to 1024"),
        (SentenceSimilarityInput(source="a", texts=["b\0"]), "texts[0]: has the character NUL at position 1"),
        (SentenceSimilarityInput(source="a", texts=["b"], dimensions=5), "dimensions: 5, the model has 4"),
        (
            SentenceSimilarityInput(source="a", texts=["a", "a b c d e"]),
            "texts[1]: 7 tokens, the model takes 6; set truncation to cut",
        ),
        (
            SentenceSimilarityInput(source="a b c d e", texts=["a"]),
            "source: 7 tokens, the model takes 6; set truncation to cut",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_input_is_refused_by_its_fields_name(input: SentenceSimilarityInput, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert caught.value.message == expected


def test_an_encoding_depends_on_every_text() -> None:
    input = SentenceSimilarityInput(source="a", texts=["b", "c"], dimensions=2)
    assert TASK.traits(input) == TASK.traits(SentenceSimilarityInput(source="a", texts=["b", "c"]))
    assert TASK.traits(input) != TASK.traits(SentenceSimilarityInput(source="a", texts=["b", "d"]))
