"""Static embeddings equal those of model2vec and of sentence-transformers' StaticEmbedding."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from model2vec import StaticModel
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, SentenceSimilarityInput, TaskInput, Truncation
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.repository import for_neuron
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

# Sums of up to 300 numbers in another order.
_TOLERANCE = 2e-6
# Of float16: model2vec rounds a mean to it.
_HALF = 2e-3
_WIDTH = 32
# The last text is unknown to word pieces as a whole: its vector is zero in model2vec.
_TEXTS = ("ok", "The ferry leaves Stockholm at half past nine.", "北京 ☃ cat", "many words " * 60, "☃")


def _rows(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(20261129).standard_normal((count, _WIDTH)).astype(np.float32)


def _model2vec(folder: Path, make: Callable[..., Any], dtype: str = "float32", **options: Any) -> Path:
    tokenizer = make(max_tokens=64)._tokenizer
    rows = tokenizer.get_vocab_size()
    if options.pop("is_shared", False):  # as quantize_vocabulary leaves it
        random = np.random.default_rng(3)
        options |= {"weights": random.random(rows).astype(np.float32), "token_mapping": random.integers(0, 50, rows)}
    vectors = _rows(50 if "token_mapping" in options else rows)
    if dtype == "int8":
        vectors = np.round(vectors * 30)
    model = StaticModel(vectors.astype(dtype), tokenizer, config={"model_type": "model2vec"}, **options)
    model.save_pretrained(folder / "model")
    return folder / "model"


def _sentence_transformer(folder: Path, make: Callable[..., Any], *others: Any) -> Path:
    tokenizer = make(max_tokens=64)
    table = StaticEmbedding(tokenizer, embedding_weights=_rows(len(tokenizer)))
    SentenceTransformer(modules=[table, *others], device="cpu", prompts={"query": "search: "}).save(
        str(folder / "model")
    )
    return folder / "model"


def _inputs(texts: Sequence[str] = _TEXTS, **options: Any) -> list[TaskInput]:
    right = Truncation.TRUNCATION_RIGHT
    return [
        TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, truncation=right, **options)) for text in texts
    ]


async def _vectors(folder: Path, inputs: Sequence[TaskInput], **changes: Any) -> NDArray[np.float64]:
    return np.array(
        [result.sentence_embedding.embedding for result in await infer_all(folder, inputs, **changes)], np.float64
    )


_MODEL2VEC: Mapping[str, Callable[[Path], Path]] = {
    "word pieces": lambda folder: _model2vec(folder, word_piece, normalize=True),
    "unigram, shared rows": lambda folder: _model2vec(folder, unigram, is_shared=True),
    "byte-level, 9 tokens": lambda folder: _model2vec(folder, byte_level_bpe, max_length=9),
    "int8": lambda folder: _model2vec(folder, word_piece, "int8"),
    "float16": lambda folder: _model2vec(folder, word_piece, "float16"),
}


@pytest.mark.parametrize("name", _MODEL2VEC)
async def test_vectors_equal_those_of_model2vec(name: str, tmp_path: Path) -> None:
    source = _MODEL2VEC[name](tmp_path)
    bundle = compile_model(source, tmp_path / "repository", name="model")
    assert bundle.spec.tasks == ("sentence_embedding", "sentence_similarity")
    assert bundle.spec.max_tokens == (9 if "9 tokens" in name else 512)
    assert bundle.spec.is_static
    reference = StaticModel.from_pretrained(source)
    for is_scaled in (True, False):
        ours = await _vectors(bundle.folder, _inputs(skip_normalize=not is_scaled))
        expected = reference.encode(list(_TEXTS), normalize=is_scaled).astype(np.float64)
        largest = max(1, np.abs(expected).max())
        tolerance = (_HALF if name == "float16" else _TOLERANCE) * largest
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
        right = Truncation.TRUNCATION_RIGHT
        input = SentenceEmbeddingInput(texts=_TEXTS, truncation=right, skip_normalize=not is_scaled)
        (result,) = await infer_all(bundle.folder, [TaskInput(sentence_embedding=input)])
        together = np.array(result.sentence_embedding.embedding).reshape(result.sentence_embedding.vectors, -1)
        np.testing.assert_allclose(together, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ["openvino", "torch"])
async def test_vectors_equal_those_of_static_embedding(backend: str, tmp_path: Path) -> None:
    source = _sentence_transformer(tmp_path, unigram, Dense(_WIDTH, 16), Normalize())
    bundle = compile_model(source, tmp_path / "repository", name="model", backend=backend)
    reference = SentenceTransformer(str(source), device="cpu")
    texts = list(_TEXTS)
    expected = reference.encode(texts)
    np.testing.assert_allclose(
        await _vectors(bundle.folder, _inputs(), backend=backend), expected, rtol=0, atol=_TOLERANCE
    )
    named = await _vectors(bundle.folder, _inputs(prompt_name="query"), backend=backend)
    np.testing.assert_allclose(named, reference.encode(texts, prompt_name="query"), rtol=0, atol=_TOLERANCE)


async def test_a_table_without_a_limit_takes_long_texts_and_answers_similarity(tmp_path: Path) -> None:
    source = _sentence_transformer(tmp_path, word_piece)
    bundle = compile_model(source, tmp_path / "repository", name="model", dtype="bfloat16")
    assert bundle.spec.max_tokens == 32_768
    reference = SentenceTransformer(str(source), device="cpu")
    texts = ["cats sleep", "words and more words " * 2000]
    (result,) = await infer_all(
        bundle.folder, [TaskInput(sentence_similarity=SentenceSimilarityInput(source=_TEXTS[1], texts=texts))]
    )
    expected = reference.similarity(reference.encode([_TEXTS[1]]), reference.encode(texts))[0]
    np.testing.assert_allclose(list(result.sentence_similarity.scores), expected, rtol=0, atol=2e-2)
    with pytest.raises(InvalidInput, match="text: is empty, and has no tokens"):
        await infer_all(bundle.folder, _inputs([""]))


def test_the_graph_for_neuron_equals_that_of_pytorch(tmp_path: Path, neuron_double: Mapping[str, str]) -> None:
    source = _model2vec(tmp_path, word_piece)
    bundle = compile_model(source, tmp_path / "repository", name="model", **for_neuron(tmp_path, "4x64"))
    accuracy = bundle.manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert accuracy.largest_difference < _TOLERANCE


def test_a_quantized_table_agrees(tmp_path: Path) -> None:
    source = _model2vec(tmp_path, word_piece)
    bundle = compile_model(source, tmp_path / "repository", name="model", dtype="int8-weights")
    accuracy = bundle.manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert accuracy.agreement is not None
    assert accuracy.agreement > 0.999


def test_a_folder_without_its_table_is_refused(tmp_path: Path) -> None:
    source = _model2vec(tmp_path, word_piece)
    safetensors.numpy.save_file({"other": _rows(3)}, source / "model.safetensors")
    problem = r"its weights have no table of token vectors \(embeddings or embedding.weight\)"
    with pytest.raises(SetupError, match=problem):
        compile_model(source, tmp_path / "repository", name="model")
