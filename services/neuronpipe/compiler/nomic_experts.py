"""Nomic BERT with experts (nomic-embed-text-v2-moe): in every second layer a token goes through the best two of eight
feed-forward networks, and all linear layers have biases.

transformers has Nomic BERT without them. Source: modeling_hf_nomic_bert.py of nomic-bert-2048, as
text-embeddings-inference computes it (nomic.rs): experts are weighted by the router's softmax, which is not normalized
again over the best.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.nn.functional import gelu

# transformers 4 has no Nomic BERT at all; this module can be imported there.
_Config: Any = getattr(transformers, "NomicBertConfig", transformers.PretrainedConfig)
_Model: Any = getattr(transformers, "NomicBertModel", transformers.PreTrainedModel)


class NomicExpertsConfig(_Config):
    """Layers 1, 1 + `moe_every_n_layers` and so on have `num_experts` experts, of which a token takes `moe_top_k`."""

    model_type = "nomic_experts"

    num_experts: int = 8
    moe_top_k: int = 2
    moe_every_n_layers: int = 2


class _FeedForward(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = torch.nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(gelu(self.fc1(vectors)))
        return result


class _Router(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self._top_k = config.moe_top_k

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The weight of each expert for each token, [tokens, experts]: 0 for those that the token does not take."""
        weights = self.layer(vectors).softmax(-1)
        best, chosen = weights.topk(self._top_k, dim=-1)
        return torch.zeros_like(weights).scatter(-1, chosen, best)


class _Networks(torch.nn.Module):
    """The weights of all experts, one below the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows = config.num_experts * config.intermediate_size
        self.w1, self.w2 = (torch.nn.Parameter(torch.empty(rows, config.hidden_size)) for _ in range(2))


class _Experts(torch.nn.Module):
    # Whether each expert computes its own tokens only, for graphs whose shapes are free. With fixed ones each computes
    # all.
    takes_rows = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mlp = _Networks(config)
        self.bias = torch.nn.Parameter(torch.zeros(config.hidden_size))
        self._inner = config.intermediate_size

    def forward(self, vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = self.bias.repeat(vectors.shape[0], 1)
        networks = zip(self.mlp.w1.split(self._inner), self.mlp.w2.split(self._inner), strict=True)
        for number, (first, second) in enumerate(networks):
            weight = weights[:, number : number + 1]
            if self.takes_rows:
                rows = weight[:, 0].nonzero()[:, 0]
                own = gelu(vectors.index_select(0, rows) @ first.T) @ second * weight.index_select(0, rows)
                result = result.index_add(0, rows, own.to(result.dtype))
            else:
                result = result + gelu(vectors @ first.T) @ second * weight
        return result


class _ExpertLayer(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = _Router(config)
        self.experts = _Experts(config)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        flat = vectors.flatten(0, 1)
        result: torch.Tensor = self.experts(flat, self.router(flat)).view(vectors.shape)
        return result


class NomicExpertsModel(_Model):
    """The encoder."""

    config_class = NomicExpertsConfig

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer)
        width = config.hidden_size
        for number, layer in enumerate(self.layers):
            has_experts = number % config.moe_every_n_layers == 1
            layer.mlp = _ExpertLayer(config) if has_experts else _FeedForward(config)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, torch.nn.Linear(width, width))
        self.post_init()


@contextlib.contextmanager
def taking_rows(module: torch.nn.Module) -> Iterator[None]:
    """Has experts compute their own tokens only, which took 0.4 of the time (OpenVINO, measured 2026-11-24)."""
    experts = [part for part in module.modules() if isinstance(part, _Experts)]
    for one in experts:
        one.takes_rows = True
    try:
        yield
    finally:
        for one in experts:
            one.takes_rows = False


def register_nomic_experts() -> None:
    """Has transformers' automatic classes know the model, and the names of its published weights."""
    if not hasattr(transformers, "NomicBertModel"):
        return
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    kind = NomicExpertsConfig.model_type
    transformers.AutoConfig.register(kind, NomicExpertsConfig, exist_ok=True)
    transformers.AutoModel.register(NomicExpertsConfig, NomicExpertsModel, exist_ok=True)
    names = [
        WeightRenaming("encoder.layers", "layers"),
        WeightRenaming("emb_ln", "embeddings.LayerNorm"),
        WeightRenaming("attn.out_proj", "self_attn.o_proj"),
        WeightRenaming("norm1", "post_attention_layernorm"),
        WeightRenaming("norm2", "post_mlp_layernorm"),
        WeightConverter(
            "attn.Wqkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], operations=[Chunk(dim=0)]
        ),
    ]
    register_checkpoint_conversion_mapping(kind, names, overwrite=True)
