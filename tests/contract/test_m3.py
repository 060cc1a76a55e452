"""bge-m3's vectors, weights of tokens and vectors of tokens equal FlagEmbedding's."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from neuronpipe.api.v1.tasks_pb2 import (
    MultiVectorEmbeddingInput,
    RerankInput,
    SentenceEmbeddingInput,
    SparseEmbeddingInput,
    SparseEmbeddingResult,
    TaskInput,
    Truncation,
)
from neuronpipe.bundles.repository import Bundle
from neuronpipe.client.task_call import to_array
from neuronpipe.compiler.unused_files import unused_files
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.contract.inference import infer_all
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.repository import for_neuron

_TOLERANCE = 5e-5
_RIGHT = Truncation.TRUNCATION_RIGHT
_TEXTS = ("ok", "The cat and the other cat sat on the cat's mat.", "北京是中华人民共和国的首都。", "many words " * 40)
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")


def _make_source(folder: Path) -> Path:
    """An XLM-R with random layers, as bge-m3 is published: a sentence-transformers folder with two more files."""
    base = make_source(folder / "base", "XLM-R", "sentence_embedding")
    SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "cls"), Normalize()], device="cpu").save(
        str(folder / "model")
    )
    limits = {"max_seq_length": 64, "do_lower_case": False}
    (folder / "model" / "sentence_bert_config.json").write_text(json.dumps(limits))
    torch.manual_seed(20261129)
    for name, width in zip(_HEADS, (1, 32), strict=True):
        torch.save(torch.nn.Linear(32, width).state_dict(), folder / "model" / name)
    return folder / "model"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_source(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="module")
def compiled(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """The model's bundle for a back end, compiled once."""
    return cache(
        lambda backend: compile_model(source, tmp_path_factory.mktemp("repository"), name="model", backend=backend)
    )


def _flag_embedding(source: Path, texts: Sequence[str]) -> Mapping[str, Any]:
    """The answers of FlagEmbedding 1.4.2's BGEM3FlagModel.encode, by its own formulas.

    Sources: finetune/embedder/encoder_only/m3/modeling.py, inference/embedder/encoder_only/m3.py. Equal to the package
    with this model (2026-11-29), whose installation needs far more than the formulas do.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModel.from_pretrained(source).eval()
    layers = {name: torch.load(source / name, weights_only=True) for name in _HEADS}
    sparse, colbert = (torch.nn.Linear(32, len(layers[name]["weight"])) for name in _HEADS)
    for layer, name in zip((sparse, colbert), _HEADS, strict=True):
        layer.load_state_dict(layers[name])
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    answers: dict[str, list[Any]] = {"dense_vecs": [], "lexical_weights": [], "colbert_vecs": []}
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=model.config.max_position_embeddings - 2)
        with torch.inference_mode():
            hidden = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).last_hidden_state
            token_weights = torch.relu(sparse(hidden))[0, :, 0].tolist()
            vectors = torch.nn.functional.normalize(colbert(hidden[:, 1:]), dim=-1)[0].numpy()
        weights: dict[int, float] = {}
        for weight, token_id in zip(token_weights, inputs["input_ids"], strict=True):
            if token_id not in unused and weight > weights.get(token_id, 0):
                weights[token_id] = weight
        answers["dense_vecs"].append(torch.nn.functional.normalize(hidden[0, 0], dim=-1).numpy())
        answers["lexical_weights"].append(weights)
        answers["colbert_vecs"].append(vectors)
    return answers


def _weights(result: SparseEmbeddingResult) -> dict[int, float]:
    return {token.token_id: token.weight for token in result.weights}


def _inputs() -> list[TaskInput]:
    return [
        input
        for text in _TEXTS
        for input in (
            TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, truncation=_RIGHT)),
            TaskInput(sparse_embedding=SparseEmbeddingInput(text=text, truncation=_RIGHT)),
            TaskInput(multi_vector_embedding=MultiVectorEmbeddingInput(text=text, truncation=_RIGHT)),
        )
    ]


@pytest.mark.parametrize("backend", ["openvino", pytest.param("torch", marks=pytest.mark.sampled)])
async def test_one_bundle_answers_the_three_tasks_as_flag_embedding_does(
    backend: str, source: Path, compiled: Callable[[str], Bundle]
) -> None:
    bundle = compiled(backend)
    assert bundle.spec.task == "sentence_embedding"
    assert {"sparse_embedding", "multi_vector_embedding"} < {*bundle.spec.also_answers}
    expected = _flag_embedding(source, _TEXTS)
    answers = iter(await infer_all(bundle.folder, _inputs(), backend=backend))
    for number in range(len(_TEXTS)):
        dense, sparse, vectors = next(answers), next(answers), next(answers)
        ours = np.array(dense.sentence_embedding.embedding)
        np.testing.assert_allclose(ours, expected["dense_vecs"][number], rtol=0, atol=_TOLERANCE)
        weights = _weights(sparse.sparse_embedding)
        assert weights == pytest.approx(expected["lexical_weights"][number], abs=_TOLERANCE)
        assert len(weights) >= 1
        ours = to_array(vectors.multi_vector_embedding)
        np.testing.assert_allclose(ours, expected["colbert_vecs"][number], rtol=0, atol=_TOLERANCE)


async def test_one_request_returns_the_three_results(source: Path, compiled: Callable[[str], Bundle]) -> None:
    bundle = compiled("openvino")
    whole: dict[str, Any] = {"return_sparse": True, "return_multi_vector": True}
    long = _TEXTS[-1]
    inputs = [SentenceEmbeddingInput(text=text, truncation=_RIGHT, **whole) for text in _TEXTS]
    inputs += [
        SentenceEmbeddingInput(text=long, max_chunks=9, **whole),
        SentenceEmbeddingInput(text=long, max_chunks=9),
    ]
    alone = await infer_all(bundle.folder, _inputs())
    *together, in_chunks, in_chunks_alone = [
        answer.sentence_embedding
        for answer in await infer_all(bundle.folder, [TaskInput(sentence_embedding=input) for input in inputs])
    ]
    for number, result in enumerate(together):
        dense, sparse, vectors = alone[3 * number : 3 * number + 3]
        assert result.embedding == pytest.approx(dense.sentence_embedding.embedding, abs=_TOLERANCE)
        assert _weights(result.sparse) == pytest.approx(_weights(sparse.sparse_embedding), abs=_TOLERANCE)
        both = to_array(result.multi_vector), to_array(vectors.multi_vector_embedding)
        np.testing.assert_allclose(*both, rtol=0, atol=_TOLERANCE)
    # Each chunk of 64 tokens has two special tokens: a vector for all tokens but the first of each.
    tokens = len(transformers.AutoTokenizer.from_pretrained(source)(long)["input_ids"]) - 2
    chunks = -(-tokens // 62)
    assert in_chunks.embedding == pytest.approx(in_chunks_alone.embedding, abs=_TOLERANCE)
    assert not in_chunks_alone.HasField("sparse")
    assert list(in_chunks.multi_vector.shape) == [tokens + chunks, 32]
    assert chunks > 1
    in_all, in_first = _weights(in_chunks.sparse), _weights(together[-1].sparse)
    assert all(in_all[token_id] >= weight - _TOLERANCE for token_id, weight in in_first.items())


async def test_other_results_of_a_model_without_them_are_refused(tmp_path: Path) -> None:
    base = make_source(tmp_path / "base", "XLM-R", "sentence_embedding")
    bundle = compile_model(base, tmp_path / "repository", "sentence_embedding", name="model")
    for field, task in (("return_sparse", "sparse-embedding"), ("return_multi_vector", "multi-vector-embedding")):
        asked: dict[str, Any] = {field: True}
        input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text="ok", **asked))
        with pytest.raises(InvalidInput, match=rf"{field}: is for a model that also answers {task}"):
            await infer_all(bundle.folder, [input])


def test_the_neuron_graph_has_the_three_outputs(source: Path, tmp_path: Path, neuron_double: Mapping[str, str]) -> None:
    bundle = compile_model(source, tmp_path / "repository", name="model", **for_neuron(tmp_path, "4x64"))
    names = [output.name for output in bundle.spec.outputs]
    assert names == ["sentence_embedding", "token_weights", "token_embeddings"]
    accuracy = bundle.manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert accuracy.largest_difference < _TOLERANCE


async def test_texts_are_ranked_by_the_mean_of_best_products(source: Path, compiled: Callable[[str], Bundle]) -> None:
    bundle = compiled("openvino")
    query, *texts = _flag_embedding(source, _TEXTS)["colbert_vecs"]
    # compute_colbert_score and colbert_score of FlagEmbedding
    expected = [(query @ text.T).max(-1).sum() / len(query) for text in texts]
    rerank = RerankInput(query=_TEXTS[0], texts=_TEXTS[1:], truncation=_RIGHT)
    (result,) = await infer_all(bundle.folder, [TaskInput(rerank=rerank)])
    scores = {text.index: text.score for text in result.rerank.texts}
    np.testing.assert_allclose([scores[number] for number in range(len(texts))], expected, rtol=0, atol=1e-4)


def test_every_file_is_used_and_other_tasks_are_refused(tmp_path: Path) -> None:
    source = _make_source(tmp_path)
    assert unused_files(source, "sentence_embedding") == []
    assert unused_files(source, "feature_extraction") == ["module Pooling", "colbert_linear.pt", "sparse_linear.pt"]
    for task in ("sparse_embedding", "multi_vector_embedding"):
        with pytest.raises(SetupError, match=r"has sparse_linear.pt and colbert_linear.pt: leave out --task"):
            compile_model(source, tmp_path / "repository", task, name="model")
    torch.save({"weight": torch.zeros(1, 7)}, source / "sparse_linear.pt")
    with pytest.raises(SetupError, match=r"sparse_linear.pt: is no linear layer of 32 inputs"):
        compile_model(source, tmp_path / "repository", name="model")
