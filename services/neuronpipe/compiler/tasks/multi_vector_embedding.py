"""Compiles for multi-vector embedding: an encoder and the layers behind it, for each token, as one graph."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.late_interaction import read_late_interaction
from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.tasks.multi_vector_embedding import KEPT, SEEN, SEEN_AND_KEPT, MultiVectorFacts
from neuronpipe.tasks.rerank import RerankFacts

_OUTPUT, _ROLE = "token_embeddings", "token_role"


class _TokenVectors(torch.nn.Module):
    """Vectors [batch, tokens, width] of the tokens that have one; zeros for the others.

    `token_role`, int64 [batch, tokens], is what each token is for (tasks/multi_vector_embedding.py).
    """

    def __init__(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
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
        made = self.layers(vectors)
        return {_OUTPUT: torch.where(is_kept.unsqueeze(-1), made, torch.zeros_like(made))}


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    parts = read_late_interaction(folder)
    model = load_weights(transformers.AutoModel, parts.model_folder)
    module = source_module(
        _TokenVectors(model, parts.layers),
        model,
        "multi_vector_embedding",
        tokenizer,
        outputs=(_OUTPUT,),
        per_token=True,
        max_tokens=parts.max_tokens,
        further_inputs=(_ROLE,),
    )
    linear = [layer for layer in module.module.modules() if isinstance(layer, torch.nn.Linear)]
    facts = MultiVectorFacts(
        embedding_dimensions=linear[-1].out_features if parts.layers else model.config.hidden_size,
        query=parts.kind("query", tokenizer, module.max_tokens),
        document=parts.kind("document", tokenizer, module.max_tokens),
        divides_by_tokens=parts.divides_by_tokens,
    )
    # It ranks, too; a cross-encoder's facts say that scores are what they are.
    ranking = RerankFacts(score_function="none", compares_tokens=True)
    return replace(
        module,
        inputs=tuple(name for name in module.inputs if name != "attention_mask"),  # token_role says it
        facts={"multi_vector_embedding": facts, "rerank": ranking},
        remarks={
            "queries": f"up to {facts.query.max_tokens} tokens"
            + (f", with [MASK] up to {facts.query.expanded_to}" if facts.query.expanded_to else ""),
            "documents": f"up to {facts.document.max_tokens} tokens",
        },
    )


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    batch = dict(encode_texts(module, texts))
    mask = batch["attention_mask"]
    # Every fifth token has no vector, and every seventh is not seen, so that both are compared.
    places = np.arange(mask.shape[1])
    roles = np.where(places % 7 == 6, KEPT, np.where(places % 5 == 4, SEEN, SEEN_AND_KEPT))
    return {**batch, _ROLE: mask * roles}


def _smallest_cosine_similarity(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    one, other = (vectors[_OUTPUT].astype(np.float64) for vectors in (outputs, reference))
    lengths = np.linalg.norm(one, axis=2) * np.linalg.norm(other, axis=2)
    cosines = (one * other).sum(axis=2) / np.maximum(lengths, np.finfo(np.float64).tiny)
    is_kept = np.isin(batch[_ROLE], (KEPT, SEEN_AND_KEPT))
    smallest: Measured = np.where(is_kept, cosines, 1).min(axis=1)
    return np.clip(smallest, 0, 1)


TASK = SourceTask(
    _load, _encode, _smallest_cosine_similarity, np.min, "smallest cosine similarity of a token's vectors"
)
