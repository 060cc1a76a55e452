"""Sparse vectors equal those of sentence-transformers' SparseEncoder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from neuronpipe.api.v1.tasks_pb2 import SparseEmbeddingInput, TaskInput, Truncation
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.contract.inference import infer_all
from tests.models.architectures import make_source
from tests.models.compiling import compile_model

# The logarithms of logits of up to 20 differ as test_parity.py's logits do.
_TOLERANCE = 5e-5
_TEXTS = ("ok", "The ferry leaves Stockholm at half past nine.", "北京是中华人民共和国的首都。", "many words " * 40)
_PROMPTS = {"query": "query: ", "document": ""}


def _model(folder: Path, architecture: str, strategy: str, activation: str, **settings: Any) -> Path:
    base = make_source(folder / "base", architecture, "fill_mask")
    modules = [Transformer(str(base), transformer_task="fill-mask"), SpladePooling(strategy, activation)]
    SparseEncoder(modules=modules, device="cpu", prompts=_PROMPTS, **settings).save(str(folder / "model"))
    return folder / "model"


def _inputs(**options: Any) -> list[TaskInput]:
    return [
        TaskInput(sparse_embedding=SparseEmbeddingInput(text=text, truncation=Truncation.TRUNCATION_RIGHT, **options))
        for text in _TEXTS
    ]


def _reference(source: Path) -> SparseEncoder:
    return SparseEncoder(str(source), device="cpu", processor_kwargs={"split_special_tokens": True})


async def _assert_same(folder: Path, expected: torch.Tensor, **options: Any) -> None:
    names = transformers.AutoTokenizer.from_pretrained(folder.parents[2] / "base")
    for result, vector in zip(await infer_all(folder, _inputs(**options)), expected.to_dense().numpy(), strict=True):
        weights = result.sparse_embedding.weights
        assert len(weights) > 5
        ours = np.zeros_like(vector)
        ours[[one.token_id for one in weights]] = [one.weight for one in weights]
        np.testing.assert_allclose(ours, vector, rtol=0, atol=_TOLERANCE)
        assert [one.weight for one in weights] == sorted((one.weight for one in weights), reverse=True)
        assert all(one.weight > 0 for one in weights)
        assert [one.token for one in weights] == [names.decode([one.token_id]) for one in weights]


@pytest.mark.parametrize(
    ("architecture", "strategy", "activation"),
    [
        ("BERT", "max", "relu"),
        pytest.param("DistilBERT", "sum", "relu", marks=pytest.mark.sampled),
        pytest.param("ModernBERT", "max", "log1p_relu", marks=pytest.mark.sampled),
    ],
)
async def test_weights_equal_those_of_sentence_transformers(
    architecture: str, strategy: str, activation: str, tmp_path: Path
) -> None:
    source = _model(tmp_path, architecture, strategy, activation)
    found = read_configuration(source).find_task()
    assert (found.task, found.reason) == ("sparse_embedding", "modules.json")
    bundle = compile_model(source, tmp_path / "repository", name="model")
    reference = _reference(source)
    await _assert_same(bundle.folder, reference.encode(list(_TEXTS)))
    await _assert_same(bundle.folder, reference.encode(list(_TEXTS), prompt_name="query"), prompt_name="query")
    await _assert_same(bundle.folder, reference.encode(list(_TEXTS), max_active_dims=9), top_k=9)


def test_tokens_that_are_parts_of_characters_are_told_apart(tmp_path: Path) -> None:
    source = make_source(tmp_path / "base", "RoBERTa", "fill_mask")
    bundle = compile_model(source, tmp_path / "repository", "sparse_embedding", backend="fake")
    tokens = bundle.decoding_spec().tokens
    names = transformers.AutoTokenizer.from_pretrained(source)
    assert "\ufffd" not in "".join(tokens)
    assert all(
        token in (names.decode([number]), names.convert_ids_to_tokens(number)) for number, token in enumerate(tokens)
    )


async def test_a_plain_masked_language_model_is_pooled_as_sentence_transformers_pools_it(tmp_path: Path) -> None:
    source = make_source(tmp_path / "base", "BERT", "fill_mask")
    (source / "README.md").write_text("---\ntags: [splade]\npipeline_tag: feature-extraction\n---\n")
    bundle = compile_model(source, tmp_path / "repository", name="model")
    assert bundle.spec.task == "sparse_embedding"
    await _assert_same(bundle.folder, _reference(source).encode(list(_TEXTS)))


async def test_the_number_of_tokens_that_a_model_was_saved_with_is_its_default(tmp_path: Path) -> None:
    source = _model(tmp_path, "BERT", "max", "relu", max_active_dims=7)
    bundle = compile_model(source, tmp_path / "repository", name="model")
    await _assert_same(bundle.folder, _reference(source).encode(list(_TEXTS)))
    with pytest.raises(InvalidInput, match="prompt_name: is none of the model's prompts; they are: document, query"):
        await infer_all(bundle.folder, _inputs(prompt_name="other"))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            ("Transformer", "Pooling", "SparseAutoEncoder"),
            "by the modules Transformer, Pooling, SparseAutoEncoder; supp",
        ),
        (
            ("Router", "SpladePooling"),
            "makes sparse vectors by the modules Router, SpladePooling; supported is a trans",
        ),
    ],
    ids=["autoencoder", "router"],
)
def test_other_sparse_models_are_refused_by_their_modules(
    modules: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", "BERT", "fill_mask")
    written = ", ".join(f'{{"type": "sentence_transformers.models.{name}", "path": ""}}' for name in modules)
    (source / "modules.json").write_text(f"[{written}]")
    with pytest.raises(SetupError, match=message):
        compile_model(source, tmp_path / "repository", name="model")
