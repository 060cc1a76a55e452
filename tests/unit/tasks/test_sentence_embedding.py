"""tasks/sentence_embedding.py: vectors are cut and scaled, and what is refused."""

from typing import Any, Literal

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision, SentenceEmbeddingInput, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.base import EncodedText
from neuronpipe.tasks.sentence_embedding import TASK, decode
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import CLS, SEP, WordTokenizer, encode_checked

_MODEL = model_spec("sentence_embedding", max_tokens=6)


@pytest.mark.parametrize(
    ("vector", "asked", "expected"),
    [
        # 1 + 4 + 4 + 16 = 25, of which the root is 5.
        pytest.param([1, 2, 2, 4], {}, [0.2, 0.4, 0.4, 0.8], id="scaled to length one"),
        pytest.param([1, -2, 0.5, 4], {"skip_normalize": True}, [1, -2, 0.5, 4], id="left as it is where asked"),
        # Scaled first, 3 and 4 would be shares of 13.
        pytest.param([3, 4, 12, 0], {"dimensions": 2}, [0.6, 0.8], id="cut before it is scaled"),
        pytest.param([3, 4, 12, 0], {"dimensions": 3, "skip_normalize": True}, [3, 4, 12], id="cut without scaling"),
        pytest.param([0, 0, 0, 0], {}, [0, 0, 0, 0], id="the zero vector stays zero"),
    ],
)
def test_a_vector_is_cut_and_scaled_as_asked(vector: list[float], asked: Any, expected: list[float]) -> None:
    outputs = [{"sentence_embedding": np.array(vector, np.float32)}]
    result = decode(SentenceEmbeddingInput(**asked), _MODEL, [], outputs)
    assert list(result.embedding) == pytest.approx(expected, rel=1e-6)  # float32 has 7 digits


@pytest.mark.parametrize("name", ["binary", "ubinary"])
def test_bits_equal_those_of_sentence_transformers(name: Literal["binary", "ubinary"]) -> None:
    vectors = np.random.default_rng(1).standard_normal((20, 24)).astype(np.float32)
    vectors[0, :3] = 0
    precision = EmbeddingPrecision.Value(f"EMBEDDING_PRECISION_{name.upper()}")
    input = SentenceEmbeddingInput(precision=precision)
    ours = [decode(input, _MODEL, [], [{"sentence_embedding": vector}]) for vector in vectors]
    expected = quantize_embeddings(vectors, precision=name)
    assert [vector.packed for vector in ours] == [vector.tobytes() for vector in expected]
    assert {(vector.precision, len(vector.embedding)) for vector in ours} == {(precision, 0)}


@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_bytes_equal_those_of_sentence_transformers_by_the_ranges_of_the_bundle(name: Literal["int8", "uint8"]) -> None:
    vectors = np.random.default_rng(1).standard_normal((40, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ranges = np.stack([vectors[:20].min(axis=0), vectors[:20].max(axis=0)])  # which some others exceed
    ranges[:, 2] = 0.25  # a dimension that is always the same
    facts = {"lowest": ranges[0].tolist(), "highest": ranges[1].tolist()}
    model = model_spec("sentence_embedding", embedding_dimensions=4, **facts)
    input = SentenceEmbeddingInput(text="a", precision=EmbeddingPrecision.Value(f"EMBEDDING_PRECISION_{name.upper()}"))
    TASK.check(input, model)
    floats = [
        decode(SentenceEmbeddingInput(), model, [], [{"sentence_embedding": vector}]).embedding for vector in vectors
    ]
    expected = quantize_embeddings(np.array(floats, np.float32), precision=name, ranges=ranges)
    ours = [decode(input, model, [], [{"sentence_embedding": vector}]).packed for vector in vectors]
    assert ours == [vector.tobytes() for vector in expected]


def test_bytes_are_refused_without_ranges_and_for_vectors_that_have_others() -> None:
    ranged = model_spec("sentence_embedding", lowest=[0.0] * 4, highest=[1.0] * 4)
    for word, model, options, error in (
        ("int8", _MODEL, {}, "the model's bundle has no ranges for int8; compile it again"),
        ("uint8", _MODEL, {}, "the model's bundle has no ranges for uint8; compile it again"),
        ("int8", ranged, {"dimensions": 2}, "int8 has the ranges of vectors of length 1 of all dimensions only"),
        ("uint8", ranged, {"dimensions": 2}, "uint8 has the ranges of vectors of length 1 of all dimensions only"),
        ("int8", ranged, {"skip_normalize": True}, "int8 has the ranges of vectors of length 1 of all dimensions only"),
    ):
        precision = EmbeddingPrecision.Value(f"EMBEDDING_PRECISION_{word.upper()}")
        with pytest.raises(InvalidInput, match=f"^precision: {error}"):
            TASK.check(SentenceEmbeddingInput(text="a", precision=precision, **options), model)


def test_bits_that_fill_no_bytes_and_unknown_precisions_are_refused() -> None:
    for precision, error in (
        (2, "binary vectors have a multiple of 8 dimensions, not 4"),
        (3, "ubinary vectors have a multiple of 8 dimensions, not 4"),
        (9, "9 is not known"),
    ):
        input = SentenceEmbeddingInput(text="a", precision=precision)  # type: ignore[arg-type] # a newer client's
        with pytest.raises(InvalidInput, match=f"^precision: {error}$"):
            TASK.check(input, _MODEL)


def test_a_prompt_is_chosen_by_its_name() -> None:
    tokenizer = WordTokenizer()
    prompts = {"query": "find: ", "document": ""}
    model = model_spec("sentence_embedding", prompt="query: ", prompts=prompts)
    for name, text in (("query", "find: so it is"), ("document", "so it is")):
        input = SentenceEmbeddingInput(text="so it is", prompt_name=name)
        (sequence,) = encode_checked(TASK, input, tokenizer, model).sequences
        assert sequence["input_ids"].tolist() == [CLS, *tokenizer.ids(text), SEP]
    with pytest.raises(InvalidInput, match=r"^prompt_name: is none of the model's prompts; they are: document, query$"):
        TASK.check(SentenceEmbeddingInput(text="a", prompt_name="other"), model)
    with pytest.raises(InvalidInput, match=r"^prompt_name: is for a text; no prompt goes before token_ids$"):
        TASK.check(SentenceEmbeddingInput(token_ids=[4], prompt_name="query"), model)


def test_the_models_prompt_comes_before_the_text() -> None:
    tokenizer = WordTokenizer()
    model = model_spec("sentence_embedding", prompt="query: ")
    (sequence,) = encode_checked(TASK, SentenceEmbeddingInput(text="so it is"), tokenizer, model).sequences
    assert sequence["input_ids"].tolist() == [CLS, *tokenizer.ids("query: so it is"), SEP]


def test_a_text_that_is_too_long_with_the_prompt_is_refused() -> None:
    model = model_spec("sentence_embedding", prompt="query: ", max_tokens=6)
    with pytest.raises(InvalidInput, match=r"^text: 7 tokens, the model takes 6; set truncation to cut$"):
        encode_checked(TASK, SentenceEmbeddingInput(text="a b c d"), WordTokenizer(), model)


def test_a_long_text_is_cut_where_asked_and_the_loss_is_counted() -> None:
    tokenizer, input = WordTokenizer(), SentenceEmbeddingInput(text="a b c d e", truncation=Truncation.TRUNCATION_LEFT)
    encoded = encode_checked(TASK, input, tokenizer, _MODEL)
    assert encoded.sequences[0]["input_ids"].tolist() == [CLS, *tokenizer.ids("b c d e"), SEP]
    assert encoded.truncated_tokens == 1


@pytest.mark.parametrize(
    ("input", "expected"),
    [
        (SentenceEmbeddingInput(text="ab\0c"), "text: has the character NUL at position 2"),
        (SentenceEmbeddingInput(text="a", dimensions=5), "dimensions: 5, the model has 4"),
        (SentenceEmbeddingInput(text="a b c d e"), "text: 7 tokens, the model takes 6; set truncation to cut"),
    ],
    ids=["NUL", "dimensions", "length"],
)
def test_a_bad_input_is_refused_by_its_fields_name(input: SentenceEmbeddingInput, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert caught.value.message == expected


def test_an_empty_text_is_what_the_model_adds_to_texts() -> None:
    tokenizer = WordTokenizer("query:")
    for prompt, ids in (("", [CLS, SEP]), ("query: ", [CLS, *tokenizer.ids("query:"), SEP])):
        model = model_spec("sentence_embedding", prompt=prompt)
        (sequence,) = encode_checked(TASK, SentenceEmbeddingInput(), tokenizer, model).sequences
        assert sequence["input_ids"].tolist() == ids


def test_an_empty_text_is_refused_where_the_model_adds_nothing() -> None:
    class Bare(WordTokenizer):
        def encode(self, text: str, text_pair: str | None = None, *, prompt: str = "") -> EncodedText:
            return EncodedText(np.zeros(0, np.int32), np.zeros(0, np.int32))

    with pytest.raises(InvalidInput, match=r"^text: is empty, and has no tokens, as the model adds no special ones$"):
        encode_checked(TASK, SentenceEmbeddingInput(), Bare(), model_spec("sentence_embedding"))


def _ids(token_ids: list[int], **fields: Any) -> tuple[list[int], int]:
    input = SentenceEmbeddingInput(token_ids=token_ids, **fields)
    encoded = encode_checked(TASK, input, WordTokenizer(), model_spec("sentence_embedding", prompt="p ", max_tokens=6))
    (sequence,) = encoded.sequences
    assert sequence["input_ids"].dtype == np.int32
    return sequence["input_ids"].tolist(), encoded.truncated_tokens


def test_token_ids_are_taken_as_they_are_and_cut_where_asked() -> None:
    assert _ids([CLS, 999, 0, SEP]) == ([CLS, 999, 0, SEP], 0)
    assert _ids([*range(8)], truncation=Truncation.TRUNCATION_RIGHT) == ([0, 1, 2, 3, 4, 5], 2)
    assert _ids([*range(8)], truncation=Truncation.TRUNCATION_LEFT) == ([2, 3, 4, 5, 6, 7], 2)


@pytest.mark.parametrize(
    ("token_ids", "text", "problem"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "", r"token_ids: 7 tokens, the model takes 6; set truncation to cut"),
        ([1, 1000], "", "token_ids: the id 1000, the vocabulary has 1000"),
        ([1 << 31], "", "token_ids: the id 2147483648, the vocabulary has 1000"),
        ([1], "a", "token_ids: replace text; send one of them"),
    ],
)
def test_token_ids_that_the_model_cannot_take_are_refused(token_ids: list[int], text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{problem}$"):
        _ids(token_ids, text=text)


def test_what_is_encoded_otherwise_has_other_traits() -> None:
    cut = {"token_ids": [1], "truncation": Truncation.TRUNCATION_LEFT}
    fields: list[Any] = [{"text": "1"}, {"token_ids": [1]}, {"token_ids": [1, 1]}, cut]
    fields += [{"texts": ["1"]}, {"texts": ["1", "1"]}]
    assert len({TASK.traits(SentenceEmbeddingInput(**field)) for field in fields}) == len(fields)


def test_each_of_several_texts_is_a_sequence_behind_the_prompt() -> None:
    tokenizer = WordTokenizer("query:", "a", "b")
    query, a, b = tokenizer.ids("query: a b")
    model = model_spec("sentence_embedding", prompts={"query": "query: "})
    encoded = encode_checked(TASK, SentenceEmbeddingInput(texts=["a", "b b"], prompt_name="query"), tokenizer, model)
    sequences = [[CLS, query, a, SEP], [CLS, query, b, b, SEP]]
    assert [sequence["input_ids"].tolist() for sequence in encoded.sequences] == sequences
    assert not encoded.annotations


@pytest.mark.parametrize(
    "asked",
    [{}, {"dimensions": 8}, {"skip_normalize": True}, *({"precision": precision} for precision in range(1, 6))],
    ids=str,
)
def test_the_vectors_of_texts_are_those_of_each_text_one_after_another(asked: Any) -> None:
    vectors = np.random.default_rng(7).standard_normal((3, 16)).astype(np.float32)
    model = model_spec("sentence_embedding", embedding_dimensions=16, lowest=[-0.5] * 16, highest=[0.5] * 16)
    outputs = [{"sentence_embedding": vector} for vector in vectors]
    input = SentenceEmbeddingInput(**asked)
    together, each = decode(input, model, [], outputs), [decode(input, model, [], [output]) for output in outputs]
    assert together.vectors == 3
    assert list(together.embedding) == [number for one in each for number in one.embedding]
    assert together.packed == b"".join(one.packed for one in each)
    assert {one.precision for one in (together, *each)} == {asked.get("precision", 0) * (asked.get("precision", 0) > 1)}
    assert {one.vectors for one in each} == {0}


def test_each_of_several_long_texts_has_the_mean_of_its_own_chunks() -> None:
    # Each chunk has room for 4 words: the first text has chunks of 4 and 2, the second a single one.
    input = SentenceEmbeddingInput(texts=["a b c d e f", "a"], max_chunks=2, skip_normalize=True)
    encoded = encode_checked(TASK, input, WordTokenizer(), _MODEL)
    assert [len(sequence["input_ids"]) - 2 for sequence in encoded.sequences] == [4, 2, 1]
    outputs = [{"sentence_embedding": np.full(4, number, np.float32)} for number in (1, 4, 9)]
    # (4 * 1 + 2 * 4) / 6 = 2
    assert list(decode(input, _MODEL, encoded.annotations, outputs).embedding) == [2.0] * 4 + [9.0] * 4


def test_parts_of_texts_that_no_encoding_has_are_refused() -> None:
    annotations = [{"text_tokens": np.ones(1, np.int32), "part": np.array([-1], np.int32)}] * 2
    outputs = [{"sentence_embedding": np.ones(4, np.float32)}] * 2
    with pytest.raises(InvalidInput, match=r"annotations\[0\].part"):
        decode(SentenceEmbeddingInput(), _MODEL, annotations, outputs)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a", "texts": ["b"]}, "texts: replace text; send one of them"),
        ({"token_ids": [1], "texts": ["b"]}, "texts: replace token_ids; send one of them"),
        ({"texts": ["a", "b\0"]}, "texts[1]: has the character NUL at position 1"),
        ({"texts": ["a"] * 1025}, "texts: 1025 texts, must be from 1 to 1024"),
        ({"texts": ["a"], "return_sparse": True}, "return_sparse: is for a single text"),
        ({"texts": ["a", "a b c d e"]}, "texts[1]: 7 tokens, the model takes 6; set truncation to cut"),
        (
            {"texts": ["a", "a b c d e f g h i"], "max_chunks": 2},
            "texts[1]: 3 chunks of 4 tokens, the limit is 2 (max_chunks)",
        ),
    ],
)
def test_texts_that_cannot_be_embedded_are_refused_by_their_place(fields: Any, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_checked(TASK, SentenceEmbeddingInput(**fields), WordTokenizer(), _MODEL)
    assert str(caught.value).startswith(expected)


def test_the_dropped_tokens_of_several_texts_are_counted_together() -> None:
    right = Truncation.TRUNCATION_RIGHT
    input = SentenceEmbeddingInput(texts=["a b c d e", "a", "a b c d e f"], truncation=right)
    assert encode_checked(TASK, input, WordTokenizer(), _MODEL).truncated_tokens == 1 + 2
