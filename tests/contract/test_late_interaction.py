"""Multi-vector embeddings and MaxSim equal those of sentence-transformers' MultiVectorEncoder, for its own models,
PyLate's and Stanford's.
"""

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from neuronpipe.api.v1.tasks_pb2 import FeatureType, MultiVectorEmbeddingInput, RerankInput, TaskInput, Truncation
from neuronpipe.client.task_call import to_array
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.contract.inference import infer_all
from tests.models import jina_xlm_roberta
from tests.models.architectures import make_source
from tests.models.compiling import compile_model

_TOLERANCE = 5e-5
_RIGHT = Truncation.TRUNCATION_RIGHT
_QUERIES = ("where do cats sleep?", "ok", "one, two; three! " * 20)
_DOCUMENTS = (
    "The cat, it is said, sat on the mat.",
    "...!?",
    "Trains to Berlin leave every hour; some leave every two.",
    "many words " * 60,
)


def _projection() -> Dense:
    weights = torch.from_numpy(np.random.default_rng(3).standard_normal((16, 32)).astype(np.float32))
    none = torch.nn.Identity()
    return Dense(
        32, 16, bias=False, activation_function=none, init_weight=weights, module_input_name="token_embeddings"
    )


def _own(folder: Path, architecture: str, expansion: Mapping[str, Any] | None, **mask: Any) -> Path:
    base = make_source(folder / "base", architecture, "sentence_embedding")
    transformer = Transformer(str(base), query_length=24, document_length=40, query_expansion=expansion)
    modules = [transformer, _projection(), MultiVectorMask(**mask), Normalize(module_input_name="token_embeddings")]
    prompts = {"query": "search_query: ", "document": "search_document: "}
    MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts).save(str(folder / "model"))
    return folder / "model"


def _pylate(folder: Path, **more: Any) -> Path:
    """As PyLate 1 to 3 saves it: two modules, and the rest in the settings of the whole. `more`: None takes away."""
    source = make_source(folder / "model", "BERT", "sentence_embedding")
    (source / "1_Dense").mkdir()
    _projection().save(str(source / "1_Dense"))
    dense = json.loads((source / "1_Dense" / "config.json").read_text())
    for name in ("module_input_name", "module_output_name"):
        dense.pop(name, None)
    (source / "1_Dense" / "config.json").write_text(json.dumps(dense))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["[Q] ", "[D] "])
    _resize(source, tokenizer)
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 63, "do_lower_case": False}))
    settings = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 20,
        "document_length": 40,
        "attend_to_expansion_tokens": False,
        "skiplist_words": list(string.punctuation),
        "similarity_fn_name": "MaxSim",
    }
    settings = {name: value for name, value in (settings | more).items() if value is not None}
    (source / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (source / "README.md").write_text("---\ntags: [ColBERT, PyLate]\n---\n")
    return source


def _stanford(folder: Path, architecture: str = "BERT", prefix: str = "bert") -> Path:
    """As Stanford's ColBERT saves it: a BERT with linear.weight beside it, and artifact.metadata."""
    source = make_source(folder / "model", architecture, "sentence_embedding")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[unused0]", "[unused1]"]})
    _resize(source, tokenizer)
    weights = {
        f"{prefix}.{name}": array for name, array in safetensors.torch.load_file(source / "model.safetensors").items()
    }
    weights["linear.weight"] = _projection().linear.weight.detach().contiguous()
    safetensors.torch.save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (source / "config.json").write_text(json.dumps(config))
    metadata = {"query_maxlen": 18, "doc_maxlen": 50, "attend_to_mask_tokens": False, "mask_punctuation": True}
    (source / "artifact.metadata").write_text(json.dumps(metadata))
    return source


def _resize(source: Path, tokenizer: Any) -> None:
    model = transformers.AutoModel.from_pretrained(source)
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)


_PYLATE_FIELDS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "attend_to_expansion_tokens"),
    "skiplist_words",
)
_FIXED = {"strategy": "fixed", "length": 24}
_MODELS: Mapping[str, Callable[[Path], Path]] = {
    "fixed queries of BERT": lambda folder: _own(folder, "BERT", _FIXED, skiplist_words=list(string.punctuation)),
    "seen expansion of ModernBERT": lambda folder: _own(folder, "ModernBERT", {**_FIXED, "attend": True}),
    "least length of RoBERTa": lambda folder: _own(
        folder,
        "RoBERTa",
        {"strategy": "min", "length": 12},
        skiplist_words=[",", "."],
        skiplist_tasks=["query", "document"],
    ),
    "no expansion": lambda folder: _own(folder, "BERT", None),
    "PyLate": _pylate,
    "PyLate before it named its kind": lambda folder: _pylate(folder, model_type=None, skiplist_words=None),
    "PyLate without its settings": lambda folder: _pylate(folder, model_type=None, **dict.fromkeys(_PYLATE_FIELDS)),
    "Stanford": _stanford,
}


def _inputs(texts: tuple[str, ...], *, is_query: bool) -> list[TaskInput]:
    return [
        TaskInput(multi_vector_embedding=MultiVectorEmbeddingInput(text=text, is_query=is_query, truncation=_RIGHT))
        for text in texts
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", _MODELS)
async def test_vectors_and_scores_equal_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    source = _MODELS[name](tmp_path)
    assert read_configuration(source).find_task().task == "multi_vector_embedding"
    bundle = compile_model(source, tmp_path / "repository", name="model")
    assert bundle.spec.tasks == ("multi_vector_embedding", "rerank")
    reference = MultiVectorEncoder(str(source), device="cpu")
    queries = reference.encode_query(list(_QUERIES), convert_to_numpy=True)
    documents = reference.encode_document(list(_DOCUMENTS), convert_to_numpy=True)
    for texts, expected, is_query in ((_QUERIES, queries, True), (_DOCUMENTS, documents, False)):
        for result, vectors in zip(
            await infer_all(bundle.folder, _inputs(texts, is_query=is_query)), expected, strict=True
        ):
            ours = to_array(result.multi_vector_embedding)
            assert ours.shape == vectors.shape
            np.testing.assert_allclose(ours, vectors, rtol=0, atol=_TOLERANCE)
    scores = reference.similarity(queries, documents).numpy()
    asked = [TaskInput(rerank=RerankInput(query=query, texts=_DOCUMENTS, truncation=_RIGHT)) for query in _QUERIES]
    for result, row in zip(await infer_all(bundle.folder, asked), scores, strict=True):
        found = {text.index: text.score for text in result.rerank.texts}
        np.testing.assert_allclose([found[index] for index in range(len(_DOCUMENTS))], row, rtol=0, atol=1e-3)
        assert [text.score for text in result.rerank.texts] == sorted(found.values(), reverse=True)


async def test_vectors_of_jina_colbert_2_equal_those_in_the_names_of_transformers(tmp_path: Path) -> None:
    source = _stanford(tmp_path, "Jina v3", "roberta")
    reference = MultiVectorEncoder(str(source), device="cpu")
    expected = reference.encode_document(list(_DOCUMENTS), convert_to_numpy=True)
    jina_xlm_roberta.publish(source, "HF_ColBERT")
    bundle = compile_model(source, tmp_path / "repository", name="model")
    assert bundle.spec.tasks == ("multi_vector_embedding", "rerank")
    results = await infer_all(bundle.folder, _inputs(_DOCUMENTS, is_query=False))
    for result, vectors in zip(results, expected, strict=True):
        np.testing.assert_allclose(to_array(result.multi_vector_embedding), vectors, rtol=0, atol=_TOLERANCE)


def test_a_folder_of_pylate_that_names_no_kind_is_told_its_task_and_nothing_that_is_applied(tmp_path: Path) -> None:
    source, lines = _pylate(tmp_path, model_type=None), list[str]()
    compile_model(source, tmp_path / "repository", report=lines.append, name="model")
    assert "not applied" not in "\n".join(lines)
    (source / "README.md").unlink()
    with pytest.raises(SetupError, match=r"no Pooling module.*--task multi-vector-embedding compiles"):
        compile_model(source, tmp_path / "repository", name="model")


async def test_marks_that_a_text_spells_are_text_and_limits_are_those_of_each_kind(tmp_path: Path) -> None:
    bundle = compile_model(_stanford(tmp_path), tmp_path / "repository", name="model")
    spelled, plain = await infer_all(bundle.folder, _inputs(("[unused1] a", "a"), is_query=False))
    assert spelled.multi_vector_embedding.shape[0] > plain.multi_vector_embedding.shape[0] + 1
    (result,) = await infer_all(bundle.folder, _inputs(("a",), is_query=True))
    assert list(result.multi_vector_embedding.shape) == [18, 16]
    for is_query, limit in ((True, 17), (False, 49)):
        long = MultiVectorEmbeddingInput(text="word " * 70, is_query=is_query)
        with pytest.raises(InvalidInput, match=rf"text: \d+ tokens, the model takes {limit}"):
            await infer_all(bundle.folder, [TaskInput(multi_vector_embedding=long)])
    small = MultiVectorEmbeddingInput(text="a text", type=FeatureType.FEATURE_TYPE_INT8)
    (result,) = await infer_all(bundle.folder, [TaskInput(multi_vector_embedding=small)])
    lengths = np.linalg.norm(to_array(result.multi_vector_embedding), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=0.02)


def test_what_is_no_model_of_late_interaction_is_refused(tmp_path: Path) -> None:
    plain = make_source(tmp_path / "plain", "BERT", "sentence_embedding")
    with pytest.raises(SetupError, match=r"is no model of late interaction: it has neither modules.json nor"):
        compile_model(plain, tmp_path / "repository", "multi_vector_embedding", name="model")
    source = _stanford(tmp_path)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights.pop("linear.weight")
    safetensors.torch.save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"its weights lack linear.weight, the layer of ColBERT behind its encoder"):
        compile_model(source, tmp_path / "repository", name="model")
