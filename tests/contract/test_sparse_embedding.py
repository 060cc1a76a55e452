"""Sparse vectors equal those of sentence-transformers' SparseEncoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from neuronpipe.api.v1.tasks_pb2 import SparseEmbeddingInput, TaskInput, Truncation
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.compiler.unused_files import unused_files
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


async def _assert_same(folder: Path, expected: torch.Tensor, least_tokens: int = 6, **options: Any) -> None:
    names = transformers.AutoTokenizer.from_pretrained(folder.parents[2] / "base")
    for result, vector in zip(await infer_all(folder, _inputs(**options)), expected.to_dense().numpy(), strict=True):
        weights = result.sparse_embedding.weights
        assert len(weights) >= least_tokens
        ours = np.zeros_like(vector)
        ours[[weight.token_id for weight in weights]] = [weight.weight for weight in weights]
        np.testing.assert_allclose(ours, vector, rtol=0, atol=_TOLERANCE)
        assert [weight.weight for weight in weights] == sorted((weight.weight for weight in weights), reverse=True)
        assert all(weight.weight > 0 for weight in weights)
        assert [weight.token for weight in weights] == [names.decode([weight.token_id]) for weight in weights]


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
        (("Transformer", "SparseStaticEmbedding"), "by the modules Transformer, SparseStaticEmbedding; supported is a"),
    ],
    ids=["autoencoder", "static"],
)
def test_other_sparse_models_are_refused_by_modules(modules: tuple[str, ...], message: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BERT", "fill_mask")
    written = ", ".join(f'{{"type": "sentence_transformers.models.{name}", "path": ""}}' for name in modules)
    (source / "modules.json").write_text(f"[{written}]")
    with pytest.raises(SetupError, match=message):
        compile_model(source, tmp_path / "repository", name="model")


def _router(folder: Path, default_side: str = "document", **prompts: str) -> Path:
    """Documents by SPLADE, and queries by a weight for each token, as opensearch-neural-sparse-encoding-doc-v3 is."""
    encoder = Transformer(str(make_source(folder / "base", "BERT", "fill_mask")), transformer_task="fill-mask")
    weights = torch.rand(len(encoder.tokenizer), generator=torch.Generator().manual_seed(20261129))
    weights[::7] = 0
    router = Router.for_query_document(
        [SparseStaticEmbedding(encoder.tokenizer, weights, frozen=True)],
        [encoder, SpladePooling("max", "log1p_relu")],
        default_route=default_side,
    )
    SparseEncoder(modules=[router], device="cpu", prompts=prompts).save(str(folder / "model"))
    return folder / "model"


async def _assert_sides(bundle: Path, reference: SparseEncoder) -> None:
    for side, encode in (("query", reference.encode_query), ("document", reference.encode_document)):
        for name in (side, "") if side == reference[0].default_route and not reference.prompts[side] else (side,):
            await _assert_same(bundle, encode(list(_TEXTS)), prompt_name=name, least_tokens=1)
    best = reference.encode_query(list(_TEXTS), max_active_dims=2)
    await _assert_same(bundle, best, prompt_name="query", top_k=2, least_tokens=1)


@pytest.mark.parametrize(
    ("default_side", "backend"), [("document", "openvino"), pytest.param("query", "torch", marks=pytest.mark.sampled)]
)
async def test_queries_and_documents_of_a_router_equal_those_of_sentence_transformers(
    default_side: str, backend: str, tmp_path: Path
) -> None:
    source = _router(tmp_path, default_side, document="passage: ")
    assert unused_files(source, "sparse_embedding") == []
    bundle = compile_model(source, tmp_path / "repository", name="model", backend=backend)
    assert bundle.spec.task == "sparse_embedding"
    await _assert_sides(bundle.folder, _reference(source))


async def test_a_router_whose_documents_are_at_its_root_has_weights_by_token(tmp_path: Path) -> None:
    source = _router(tmp_path)
    document, query = source / "document_0_Transformer", source / "query_0_SparseStaticEmbedding"
    written = json.loads((source / "router_config.json").read_text())
    written["types"][""] = written["types"].pop(document.name)
    written["structure"]["document"][0] = ""
    (source / "router_config.json").write_text(json.dumps(written))
    for path in document.iterdir():
        path.rename(source / path.name)
    weights = safetensors.torch.load_file(query / "model.safetensors")["weight"].tolist()
    names = transformers.AutoTokenizer.from_pretrained(source).convert_ids_to_tokens(range(len(weights)))
    idf = {name: weight for name, weight in zip(names, weights, strict=True) if weight}
    (query / "idf.json").write_text(json.dumps(idf))
    (query / "config.json").write_text(json.dumps({"frozen": True, "path": str(query / "idf.json")}))
    (query / "model.safetensors").unlink()
    bundle = compile_model(source, tmp_path / "repository", name="model")
    await _assert_sides(bundle.folder, _reference(source))


async def test_long_queries_are_cut_only_if_their_caller_allows_it(tmp_path: Path) -> None:
    bundle = compile_model(_router(tmp_path), tmp_path / "repository", name="model")
    long = SparseEmbeddingInput(text="word " * 90, prompt_name="query")
    with pytest.raises(InvalidInput, match=r"text: \d+ tokens, the model takes 64"):
        await infer_all(bundle.folder, [TaskInput(sparse_embedding=long)])
    empty = SparseEmbeddingInput(text="", prompt_name="query")
    (result,) = await infer_all(bundle.folder, [TaskInput(sparse_embedding=empty)])
    assert len(result.sparse_embedding.weights) == 0


def test_other_routers_are_refused_by_their_modules(tmp_path: Path) -> None:
    source = _router(tmp_path)
    path = source / "router_config.json"
    written = path.read_text()
    path.write_text(written.replace('"query"', '"image"'))
    problem = "is a Router of image by SparseStaticEmbedding; document by Transformer, SpladePooling; supported are"
    with pytest.raises(SetupError, match=problem):
        compile_model(source, tmp_path / "repository", name="model")
    path.write_text(written.replace('"route_mappings": {}', '"route_mappings": {"(None, None)": "query"}'))
    with pytest.raises(SetupError, match="is a Router with route_mappings, which is not supported"):
        compile_model(source, tmp_path / "repository", name="model")
    path.write_text(written)
    tokenizer = source / "query_0_SparseStaticEmbedding" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false'))
    with pytest.raises(SetupError, match=r"its tokenizer.json has another normalizer than that of documents"):
        compile_model(source, tmp_path / "repository", name="model")
