"""Compiles for sparse embedding: a masked language model and the pooling of SPLADE as one graph."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.sentence_transformers import (
    default_prompt,
    read_json,
    read_limits,
    read_prompts,
    read_settings,
    transformer_folder,
)
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.sparse_embedding import SparseFacts

_OUTPUT = "sparse_embedding"
_ENCODERS = ("Transformer", "MLMTransformer")
_STRATEGIES, _ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")


class _Splade(torch.nn.Module):
    """log(1 + relu(logits)), pooled over the tokens: [batch, vocabulary]. Source: sentence-transformers' SpladePooling.

    The largest logit has the largest weight, so that of `max` the logarithms are of one number for each token of the
    vocabulary.
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
        return {_OUTPUT: weights.sum(dim=1) if self._is_sum else weights}


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    pooling = _read_pooling(folder)
    strategy = str(pooling.get("pooling_strategy", "max"))
    activation = str(pooling.get("activation_function", "relu"))
    if strategy not in _STRATEGIES or activation not in _ACTIVATIONS:
        raise SetupError(
            f"{folder}: SpladePooling by {strategy} and {activation}; supported are {' and '.join(_STRATEGIES)} of "
            f"{' and '.join(_ACTIVATIONS)}"
        )
    model = load_weights(transformers.AutoModelForMaskedLM, folder)
    facts = SparseFacts(
        prompt=default_prompt(folder),
        prompts=read_prompts(folder),
        top_k=read_settings(folder).get("max_active_dims") or 0,
    )
    return source_module(
        _Splade(model, strategy, activation),
        model,
        "sparse_embedding",
        tokenizer,
        outputs=(_OUTPUT,),
        max_tokens=read_limits(transformer_folder(folder)).get("max_seq_length"),
        facts={"sparse_embedding": facts},
        remarks={"pooling": f"{strategy} of {activation}", "vectors": f"{model.config.vocab_size} tokens"},
    )


def _read_pooling(folder: Path) -> dict[str, Any]:
    """The settings of the module SpladePooling; empty for a plain model. Raises SetupError for other modules."""
    path = folder / "modules.json"
    modules = read_json(path) if path.is_file() else []
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if modules and (len(kinds) != 2 or kinds[0] not in _ENCODERS or kinds[1] != "SpladePooling"):
        raise SetupError(
            f"{folder}: makes sparse vectors by the modules {', '.join(kinds)}; supported is a transformer with "
            "SpladePooling"
        )
    settings: dict[str, Any] = read_json(folder / modules[1]["path"] / "config.json") if modules else {}
    return settings


def _cosine_similarity(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    one, other = (vectors[_OUTPUT].astype(np.float64) for vectors in (outputs, reference))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    both_empty = ~one.any(axis=1) & ~other.any(axis=1)
    cosines: Measured = (one * other).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return np.where(both_empty, 1.0, np.clip(cosines, 0, 1))


TASK = SourceTask(_load, encode_texts, _cosine_similarity, np.min, "smallest cosine similarity of a text's weights")
