"""Compiles for tasks of vectors: vectors of texts, their similarity, vectors of tokens, and sparse vectors.

The model and its pooling are one graph: pooling of the tokens' vectors, SPLADE pooling, or the layers behind an encoder
of late interaction. Feature extraction uses the last hidden state of a model without a head.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.compiler.images import TEXT_PARTS, TextsPart, check_texts
from neuronpipe.compiler.late_interaction import read_late_interaction
from neuronpipe.compiler.m3 import has_heads, refuse_heads, with_heads
from neuronpipe.compiler.modules import Named, Outputs, PooledModule, SampleBatch, SourceModule, source_module
from neuronpipe.compiler.routers import SIDES, read_query_side
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import (
    TOKENS,
    Layer,
    applied_settings,
    default_prompt,
    read_limits,
    read_modules,
    read_prompts,
    read_sentence_transformer,
    transformer_folder,
)
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import DPR_ENCODERS, architecture_of, load_encoder, load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.base import PROMPT_TOKENS
from neuronpipe.tasks.feature_extraction import FeatureFacts
from neuronpipe.tasks.multi_vector_embedding import KEPT, ROLE, SEEN, SEEN_AND_KEPT, MultiVectorFacts
from neuronpipe.tasks.multi_vector_embedding import OUTPUT as _OUTPUT
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.sparse_embedding import SparseFacts
from neuronpipe.tasks.vectors import EmbeddingFacts, vector_of

_HIDDEN_STATE = "last_hidden_state"


def _load_feature_extraction(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_encoder(folder)
    facts = FeatureFacts(embedding_dimensions=model.config.hidden_size)
    named, outputs = Named(model, _HIDDEN_STATE), (_HIDDEN_STATE,)
    return source_module(named, model, "feature_extraction", tokenizer, outputs=outputs, per_token=True, facts=facts)


def _cosines(first: NDArray[Any], second: NDArray[Any]) -> Measured:
    """Computes the cosine of each pair of vectors, 0 to 1: rounding may exceed 1, and below 0 is as wrong as 0.

    Two vectors without direction agree.
    """
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    cosines = (first * second).sum(axis=-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    are_empty = ~first.any(axis=-1) & ~second.any(axis=-1)
    return np.where(are_empty, 1.0, np.clip(cosines, 0, 1))


def _smallest(name: str, are_kept: NDArray[Any], outputs: Outputs, reference: Outputs) -> Measured:
    """Returns the smallest cosine of a text's vectors in an output, among the tokens that are kept."""
    return np.where(are_kept, _cosines(outputs[name], reference[name]), 1).min(axis=1)


FEATURE_EXTRACTION = SourceTask(
    _load_feature_extraction,
    encode_texts,
    lambda outputs, reference, batch: _smallest(_HIDDEN_STATE, batch["attention_mask"] == 1, outputs, reference),
    np.min,
    "smallest cosine similarity of a token's vectors",
)


_EMBEDDING = "sentence_embedding"


_TASKS = ("sentence_embedding", "sentence_similarity")


def load_embedder(folder: Path, tokenizer: SourceTokenizer, task: str = "sentence_embedding") -> SourceModule:
    """Loads an embedding model for one of the two tasks of its graph, and names both. Raises SetupError."""
    if not read_modules(folder) and (architecture := architecture_of(folder)) in (*TEXT_PARTS, *DPR_ENCODERS):
        load = _load_dpr if architecture in DPR_ENCODERS else _load_texts_part
        return load(folder, tokenizer, task)
    parts = read_sentence_transformer(folder)
    model = load_encoder(parts.model_folder)
    module = PooledModule(model, parts.head, _EMBEDDING)
    with torch.inference_mode():
        example = module(torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1), dtype=torch.int64))
    shared = EmbeddingFacts(
        embedding_dimensions=example[_EMBEDDING].shape[1], prompt=parts.prompt, prompts=dict(parts.prompts)
    )
    embedder = source_module(
        module,
        model,
        task,
        tokenizer,
        outputs=(_EMBEDDING,),
        saved_limit=parts.max_tokens,
        facts=dict.fromkeys(_TASKS, shared),
        remarks={"pooling": parts.head.describe()},
        further_inputs=() if parts.head.pooling.pools_prompt else (PROMPT_TOKENS,),
    )
    return with_heads(folder, embedder) if has_heads(folder) else embedder


def _load_texts_part(folder: Path, tokenizer: SourceTokenizer, task: str) -> SourceModule:
    model = load_weights(getattr(transformers, architecture_of(folder)), folder)
    check_texts(folder, model, tokenizer)
    module = TextsPart(model, tokenizer, _EMBEDDING)
    with torch.inference_mode():
        dimensions = module(torch.zeros((1, 1), dtype=torch.int64))[_EMBEDDING].shape[1]
    facts = dict.fromkeys(_TASKS, EmbeddingFacts(embedding_dimensions=dimensions))
    described = source_module(module, model, task, tokenizer, outputs=(_EMBEDDING,), facts=facts)
    return replace(described, inputs=("input_ids",))


def _load_dpr(folder: Path, tokenizer: SourceTokenizer, task: str) -> SourceModule:
    model = load_weights(getattr(transformers, architecture_of(folder)), folder)
    facts = EmbeddingFacts(embedding_dimensions=model.config.projection_dim or model.config.hidden_size)
    named = Named(model, **{_EMBEDDING: "pooler_output"})
    return source_module(named, model, task, tokenizer, outputs=(_EMBEDDING,), facts=dict.fromkeys(_TASKS, facts))


def cosine_similarity(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured:
    return _cosines(vector_of(outputs), vector_of(reference))


SENTENCE_EMBEDDING = SourceTask(
    load_embedder, encode_texts, cosine_similarity, np.min, "smallest cosine similarity of a text's embeddings"
)


SENTENCE_SIMILARITY = replace(SENTENCE_EMBEDDING, load=partial(load_embedder, task="sentence_similarity"))


_WEIGHTS = "sparse_embedding"
_ENCODERS = ("Transformer", "MLMTransformer")
_STRATEGIES, _ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")


class _Splade(torch.nn.Module):
    """Pools log(1 + relu(logits)) over the tokens: [batch, vocabulary]. Source: sentence-transformers' SpladePooling.

    The largest logit has the largest weight, so `max` takes one logarithm for each token of the vocabulary.
    """

    def __init__(self, model: Any, strategy: str, activation: str) -> None:
        super().__init__()
        self.named = Named(model, "logits")
        self._is_sum = strategy == "sum"
        self._logarithms = 2 if activation == "log1p_relu" else 1

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.named(input_ids, attention_mask, token_type_ids)["logits"]
        # Not a product: ModernBERT can compute NaN for padding.
        seen = torch.where(attention_mask.unsqueeze(-1).bool(), logits, torch.zeros_like(logits))
        weights = seen.relu() if self._is_sum else seen.amax(dim=1).relu()
        for _ in range(self._logarithms):
            weights = weights.log1p()
        return {_WEIGHTS: weights.sum(dim=1) if self._is_sum else weights}


def _load_sparse_embedding(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    refuse_heads(folder)
    pooling = _read_pooling(folder)
    strategy = str(pooling.get("pooling_strategy", "max"))
    activation = str(pooling.get("activation_function", "relu"))
    if strategy not in _STRATEGIES or activation not in _ACTIVATIONS:
        advice = f"supported are {' and '.join(_STRATEGIES)} of {' and '.join(_ACTIVATIONS)}"
        raise SetupError(f"{folder}: SpladePooling by {strategy} and {activation}; {advice}")
    model = load_weights(transformers.AutoModelForMaskedLM, folder)
    query_side = read_query_side(folder, tokenizer, model.config.vocab_size)
    facts = SparseFacts(
        prompt=default_prompt(folder),
        prompts={**dict.fromkeys(SIDES if query_side.query_prompts else (), ""), **read_prompts(folder)},
        top_k=applied_settings(folder).get("max_active_dims") or 0,
        query_prompts=query_side.query_prompts,
    )
    described: dict[str, Any] = {
        "saved_limit": read_limits(transformer_folder(folder)).get("max_seq_length"),
        "facts": facts,
        "remarks": {"pooling": f"{strategy} of {activation}", "vectors": f"{model.config.vocab_size} tokens"},
    }
    splade = _Splade(model, strategy, activation)
    module = source_module(splade, model, "sparse_embedding", tokenizer, outputs=(_WEIGHTS,), **described)
    return replace(module, query_weights=query_side.query_weights)


def _read_pooling(folder: Path) -> dict[str, Any]:
    """Reads the settings of the module SpladePooling; empty for a plain model. Raises SetupError for other modules."""
    modules = read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if modules and (len(kinds) != 2 or kinds[0] not in _ENCODERS or kinds[1] != "SpladePooling"):
        advice = "supported is a transformer with SpladePooling"
        raise SetupError(f"{folder}: makes sparse vectors by the modules {', '.join(kinds)}; {advice}")
    return read_object(modules[1][1] / "config.json") if modules else {}


SPARSE_EMBEDDING = SourceTask(
    _load_sparse_embedding,
    encode_texts,
    lambda outputs, reference, batch: _cosines(outputs[_WEIGHTS], reference[_WEIGHTS]),
    np.min,
    "smallest cosine similarity of a text's weights",
)


class _TokenVectors(torch.nn.Module):
    """Vectors [batch, tokens, width] of tokens by their `token_role` (tasks/multi_vector_embedding.py), or zeros."""

    def __init__(self, model: Any, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.named = Named(model, "last_hidden_state")
        self.layers = torch.nn.Sequential(*layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        token_role: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        assert token_role is not None  # noqa: S101 (the input that the module is made for)

        is_seen = (token_role == SEEN_AND_KEPT) | (token_role == SEEN)
        is_kept = (token_role == SEEN_AND_KEPT) | (token_role == KEPT)
        vectors = self.named(input_ids, is_seen.to(input_ids.dtype), token_type_ids)["last_hidden_state"]
        made = self.layers({TOKENS: vectors})[TOKENS]
        return {_OUTPUT: torch.where(is_kept.unsqueeze(-1), made, torch.zeros_like(made))}


def _load_multi_vector_embedding(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    refuse_heads(folder)
    parts = read_late_interaction(folder)
    model = load_encoder(parts.model_folder)
    module = source_module(
        _TokenVectors(model, parts.layers),
        model,
        "multi_vector_embedding",
        tokenizer,
        facts={},
        outputs=(_OUTPUT,),
        per_token=True,
        saved_limit=parts.max_tokens,
        further_inputs=(ROLE,),
    )
    linear = [layer for layer in module.module.modules() if isinstance(layer, torch.nn.Linear)]
    facts = MultiVectorFacts(
        embedding_dimensions=linear[-1].out_features if parts.layers else model.config.hidden_size,
        query=parts.kind("query", tokenizer, module.max_tokens),
        document=parts.kind("document", tokenizer, module.max_tokens),
        divides_by_tokens=parts.divides_by_tokens,
    )
    expanded = f", with [MASK] up to {facts.query.expanded_to}" if facts.query.expanded_to else ""
    # The model also ranks. A cross-encoder's facts say that its scores are the logits.
    ranking = RerankFacts(score_function="none", compares_tokens=True)
    return replace(
        module,
        inputs=tuple(name for name in module.inputs if name != "attention_mask"),  # token_role replaces it
        facts={"multi_vector_embedding": facts, "rerank": ranking},
        remarks={
            "queries": f"up to {facts.query.max_tokens} tokens{expanded}",
            "documents": f"up to {facts.document.max_tokens} tokens",
        },
    )


def _encode_multi_vector_embedding(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    batch = dict(encode_texts(module, texts))
    mask = batch["attention_mask"]
    # Every fifth token has no vector, and every seventh is not seen, so that both are compared.
    places = np.arange(mask.shape[1])
    roles = np.where(places % 7 == 6, KEPT, np.where(places % 5 == 4, SEEN, SEEN_AND_KEPT))
    return {**batch, ROLE: mask * roles}


MULTI_VECTOR_EMBEDDING = SourceTask(
    _load_multi_vector_embedding,
    _encode_multi_vector_embedding,
    lambda outputs, reference, batch: _smallest(
        _OUTPUT, np.isin(batch[ROLE], (KEPT, SEEN_AND_KEPT)), outputs, reference
    ),
    np.min,
    "smallest cosine similarity of a token's vectors",
)
