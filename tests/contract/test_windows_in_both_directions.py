"""Encoders of transformers 5 whose layers see a window in both directions answer as transformers does.

Padding behind a text sees no token through a window, so its numbers must not spread.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    SentenceEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
)
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.repository import LABELS, SMALL, named_labels
from tests.models.tokenizers import byte_level_bpe

_TEXTS = ("ok", "The ferry leaves Stockholm at half past nine.", "many words " * 5)
_TOLERANCE = 2e-5
_SIMPLE = Aggregation.AGGREGATION_SIMPLE
_SHARED = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": 4, "bos_token_id": 0}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "ultrabert": {"prediction_head_size": 16},
    "embedding_gemma2_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "sliding_window_pattern": 2,
        "hidden_size_per_layer_input": 8,
        "embedding_dim": 24,
    },
    "openai_privacy_filter": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}

pytestmark = pytest.mark.skipif(
    any(kind not in transformers.CONFIG_MAPPING for kind in _SIZES), reason="this transformers lacks the architectures"
)


def _saved(folder: Path, kind: str, auto_class: Any, **values: Any) -> Path:
    tokenizer = byte_level_bpe(max_tokens=64)
    sizes = {**_SHARED, "vocab_size": len(tokenizer), "max_position_embeddings": 64, **_SIZES[kind], **values}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(3)
    model = auto_class.from_config(transformers.CONFIG_MAPPING[kind](**sizes, **ids))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["openvino", "torch"])
async def test_scores_of_ultrabert_equal_the_pipeline(backend: str, tmp_path: Path) -> None:
    auto_class = transformers.AutoModelForSequenceClassification
    source = _saved(tmp_path / "source", "ultrabert", auto_class, **named_labels(LABELS))
    bundle = compile_model(source, tmp_path / "repository", backend=backend)
    inputs = [TaskInput(text_classification=TextClassificationInput(text=text, top_k=4)) for text in _TEXTS]
    pipeline = transformers.pipeline("text-classification", model=str(source), device="cpu", top_k=None)
    for result, expected in zip(await infer_all(bundle.folder, inputs), pipeline(list(_TEXTS)), strict=True):
        ours = {label.label: label.score for label in result.text_classification.labels}
        assert ours == pytest.approx({label["label"]: label["score"] for label in expected}, abs=_TOLERANCE)


async def test_vectors_of_embeddinggemma_2_equal_the_mean_of_its_tokens(tmp_path: Path) -> None:
    source = _saved(tmp_path / "source", "embedding_gemma2_text", transformers.AutoModel)
    bundle = compile_model(source, tmp_path / "repository", "sentence_embedding")
    model, tokenizer = transformers.AutoModel.from_pretrained(source).eval(), byte_level_bpe(max_tokens=64)
    inputs = [TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, skip_normalize=True)) for text in _TEXTS]
    for text, result in zip(_TEXTS, await infer_all(bundle.folder, inputs), strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0].detach().numpy()
        np.testing.assert_allclose(result.sentence_embedding.embedding, expected, rtol=0, atol=_TOLERANCE)


async def test_prompts_and_vectors_of_a_saved_embeddinggemma_2_equal_sentence_transformers(tmp_path: Path) -> None:
    source = _saved(tmp_path / "text", "embedding_gemma2_text", transformers.AutoModel)
    part = transformers.AutoModel.from_pretrained(source)
    whole = transformers.EmbeddingGemma2Model(transformers.EmbeddingGemma2Config(text_config=part.config.to_dict()))
    whole.language_model.load_state_dict(part.state_dict())
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    modules = [Transformer(str(source)), Pooling(24, "mean"), Normalize()]
    reference = SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    reference.save(str(tmp_path / "model"))
    whole.save_pretrained(tmp_path / "model")  # as it is published, with the part for texts inside
    bundle = compile_model(tmp_path / "model", tmp_path / "repository")
    for name in prompts:
        inputs = [TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, prompt_name=name)) for text in _TEXTS]
        found = [result.sentence_embedding.embedding for result in await infer_all(bundle.folder, inputs)]
        expected = reference.encode(list(_TEXTS), prompt_name=name)
        np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=_TOLERANCE)


async def test_entities_of_the_privacy_filter_equal_the_pipeline(tmp_path: Path) -> None:
    auto_class = transformers.AutoModelForTokenClassification
    source = _saved(tmp_path / "source", "openai_privacy_filter", auto_class, **named_labels(LABELS))
    bundle = compile_model(source, tmp_path / "repository")
    inputs = [
        TaskInput(token_classification=TokenClassificationInput(text=text, aggregation=_SIMPLE)) for text in _TEXTS
    ]
    pipeline = transformers.pipeline("token-classification", str(source), device="cpu", aggregation_strategy="simple")
    for text, result in zip(_TEXTS, await infer_all(bundle.folder, inputs), strict=True):
        found = [(entity.label, entity.start, entity.end) for entity in result.token_classification.entities]
        expected = pipeline(text)
        assert found == [(entity["entity_group"], entity["start"], entity["end"]) for entity in expected] != []
        scores = [entity.score for entity in result.token_classification.entities]
        assert scores == pytest.approx([entity["score"] for entity in expected], abs=_TOLERANCE)
