"""bge-m3: a vector of a text, weights of its tokens and a vector of each token, all from one execution.

Two linear layers behind the encoder have files of their own. Source: FlagEmbedding 1.4,
finetune/embedder/encoder_only/m3/modeling.py (_sparse_embedding, _colbert_embedding) and
inference/embedder/encoder_only/m3.py (_process_token_weights, colbert_score).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from neuronpipe.compiler.modules import PooledModule, SourceModule
from neuronpipe.compiler.onnx import graph_file
from neuronpipe.compiler.saved_files import refusing
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import TaskFacts
from neuronpipe.tasks.multi_vector_embedding import OUTPUT as VECTORS
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts, TextKind
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.sparse_embedding import TEXT_WEIGHTS, SparseFacts

HEADS = ("sparse_linear.pt", "colbert_linear.pt")
# Tokens without a weight: special tokens of these names.
_UNWEIGHED = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def has_heads(folder: Path) -> bool:
    """Returns whether a model has both layers, and weights of PyTorch."""
    return all((transformer_folder(folder) / name).is_file() for name in HEADS) and graph_file(folder) is None


def refuse_heads(folder: Path) -> None:
    """Raises SetupError for a model with both layers, whose own task is sentence-embedding."""
    if has_heads(folder):
        advice = "the bundle for sentence-embedding also answers sparse-embedding and multi-vector-embedding"
        raise SetupError(f"{folder}: has {' and '.join(HEADS)}: leave out --task; {advice}")


class _M3(torch.nn.Module):
    """The outputs of a pooled encoder, with weights [batch, tokens] and vectors [batch, tokens, width] of its tokens.

    Special tokens have the weight 0, and the first token has a vector of zeros, as padding has.
    """

    def __init__(self, pooled: PooledModule, heads: Mapping[str, torch.nn.Linear], unweighed: tuple[int, ...]) -> None:
        super().__init__()
        self.pooled = pooled
        self.sparse, self.colbert = (heads[name] for name in HEADS)
        self._unweighed = unweighed

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.pooled.model(input_ids, attention_mask, token_type_ids)["last_hidden_state"]
        is_weighed = attention_mask.bool()
        for token_id in self._unweighed:
            is_weighed = is_weighed & (input_ids != token_id)
        weights = self.sparse(hidden).squeeze(-1).relu()
        vectors = normalize(self.colbert(hidden), dim=-1)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        has_vector = (attention_mask.bool() & (places > 0)).unsqueeze(-1)
        return {
            **self.pooled.pool(hidden, attention_mask),
            TEXT_WEIGHTS: torch.where(is_weighed, weights, torch.zeros_like(weights)),
            VECTORS: torch.where(has_vector, vectors, torch.zeros_like(vectors)),
        }


def with_heads(folder: Path, module: SourceModule) -> SourceModule:
    """Adds M3's layers for sparse weights and token vectors to an embedder's module, and the tasks that they serve.

    Raises SetupError.
    """
    heads = {name: _read_linear(transformer_folder(folder) / name, module.config.hidden_size) for name in HEADS}
    ids = {getattr(module.tokenizer.transformers_tokenizer, name) for name in _UNWEIGHED}
    assert isinstance(module.module, PooledModule)  # noqa: S101 (load_embedder made it)
    m3 = _M3(module.module, heads, tuple(sorted(token_id for token_id in ids if token_id is not None)))
    text = TextKind(max_tokens=module.max_tokens)
    width = heads[HEADS[1]].out_features
    facts: dict[str, TaskFacts] = {
        "sparse_embedding": SparseFacts(prompt=module.prompt, prompts=module.fact("prompts")),
        "multi_vector_embedding": MultiVectorFacts(
            embedding_dimensions=width, query=text, document=text, divides_by_tokens=True
        ),
        "rerank": RerankFacts(score_function="none", compares_tokens=True),
        **module.facts,
    }
    return dataclasses.replace(
        module,
        module=m3.eval(),
        outputs=(*module.outputs, TEXT_WEIGHTS, VECTORS),
        per_token_outputs=frozenset((TEXT_WEIGHTS, VECTORS)),
        facts=facts,
        remarks={**module.remarks, "tokens": f"a weight and a vector of {width} numbers for each ({', '.join(HEADS)})"},
    )


def _read_linear(path: Path, width: int) -> torch.nn.Linear:
    with refusing(f"{path}: is no linear layer of {width} inputs", advice="; get the file again"):
        weights: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        linear = torch.nn.Linear(width, weights["weight"].shape[0])
        linear.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return linear.requires_grad_(False)
