"""Our own graphs of models that transformers lacks. Their parts have the names of the published weights.

Jina-BERT v2 (jina-embeddings-v2, jina-reranker-v1) is BERT whose attention uses distances instead of positions. In
Nomic BERT with experts (nomic-embed-text-v2-moe), a token goes through the best two of eight feed-forward networks in
every second layer, and all linear layers have biases. transformers has Nomic BERT without experts.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.clip.modeling_clip import CLIPMLP

from neuronpipe.compiler.architectures import replacing
from neuronpipe.compiler.static_embeddings import register_static_embeddings

_ACTIVATIONS = {"geglu": torch.nn.functional.gelu, "reglu": torch.nn.functional.relu}
FEED_FORWARD_TYPES = tuple(_ACTIVATIONS)


class JinaBertConfig(transformers.BertConfig):
    """The configuration of Jina-BERT v2. `has_query_norms`: the model normalizes queries and keys.

    Sources: modeling_bert.py of jina-bert-implementation, and modeling_bert.py of jina-bert-v2-qk-post-norm, which has
    more norms; "Train Short, Test Long" (ALiBi), arXiv 2108.12409, with distances in both directions as in arXiv
    2310.19923.
    """

    model_type = "jina_bert"

    def __init__(self, feed_forward_type: str = "geglu", has_query_norms: bool = False, **values: Any) -> None:
        super().__init__(**values)
        self.feed_forward_type = feed_forward_type
        self.has_query_norms = has_query_norms


class _Embeddings(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = torch.nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = _norm(config)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))


class _SelfAttention(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        if config.has_query_norms:
            self.layer_norm_q, self.layer_norm_k = _norm(config), _norm(config)

    def forward(self, vectors: torch.Tensor, attention_mask: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        query, key, value = self.query(vectors), self.key(vectors), self.value(vectors)
        if self.config.has_query_norms:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        shape = (*vectors.shape[:2], self.config.num_attention_heads, -1)
        query, key, value = (projected.view(shape).transpose(1, 2) for projected in (query, key, value))
        if self.config._attn_implementation == "eager":
            scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
            seen = torch.softmax(scores + attention_mask, dim=-1) @ value
        else:
            seen = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return seen.transpose(1, 2).reshape(vectors.shape), None


class _FeedForward(torch.nn.Module):
    """The `gate` is the first half of the first layer's outputs, in the second kind of model the second half."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        first = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        second = torch.nn.Linear(config.intermediate_size, config.hidden_size)
        self.config = config
        self.activation = _ACTIVATIONS[config.feed_forward_type]
        if config.has_query_norms:
            self.up_gated_layer, self.down_layer = first, second
        else:
            self.gated_layers, self.wo, self.layernorm = first, second, _norm(config)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        if self.config.has_query_norms:
            (other, gate), last = self.up_gated_layer(vectors).chunk(2, dim=-1), self.down_layer
        else:
            (gate, other), last = self.gated_layers(vectors).chunk(2, dim=-1), self.wo
        return last(self.activation(gate) * other)


class _JinaBertLayer(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.attention = BertAttention(config)
        self.attention.self = _SelfAttention(config)
        self.mlp = _FeedForward(config)
        if config.has_query_norms:
            self.layer_norm_1, self.layer_norm_2 = _norm(config), _norm(config)

    def forward(self, vectors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        attended = self.attention(vectors, bias)[0]
        if self.config.has_query_norms:
            attended, norm = self.layer_norm_1(vectors + attended), self.layer_norm_2
        else:
            norm = self.mlp.layernorm
        return norm(attended + self.mlp(attended))


class JinaBertModel(transformers.BertModel):
    """The encoder. It takes texts of any length, because no weight depends on a position."""

    config_class = JinaBertConfig

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.embeddings = _Embeddings(config)
        self.encoder.layer = torch.nn.ModuleList([_JinaBertLayer(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        **ignored: Any,
    ) -> BaseModelOutputWithPooling:
        vectors = self.embeddings(input_ids, token_type_ids)
        bias = _bias(attention_mask, self.config.num_attention_heads, vectors.dtype)
        for layer in self.encoder.layer:
            vectors = layer(vectors, bias)
        pooled = None if self.pooler is None else self.pooler(vectors)
        return BaseModelOutputWithPooling(last_hidden_state=vectors, pooler_output=pooled)


class _WithHead(transformers.BertPreTrainedModel):
    config_class = JinaBertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config, self._has_pooling)
        self.post_init()


class JinaBertForMaskedLM(_WithHead, transformers.BertForMaskedLM):
    _has_pooling = False


class JinaBertForSequenceClassification(_WithHead, transformers.BertForSequenceClassification):
    _has_pooling = True


JINA_BERTS: dict[str, Any] = {
    model_class.__name__: model_class
    for model_class in (JinaBertModel, JinaBertForMaskedLM, JinaBertForSequenceClassification)
}


def _norm(config: Any) -> torch.nn.LayerNorm:
    return torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _bias(attention_mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Computes attention biases, [batch, heads, tokens, tokens], which fall with the distance and mask padding.

    The biases are as large as the scores: 8,192 tokens take 3.2 GB with 12 heads (docs/benchmarks/README.md).
    """
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    distance = (positions[:, None] - positions[None, :]).abs().to(dtype)
    slopes = torch.tensor(_slopes(heads), dtype=dtype, device=attention_mask.device)
    bias = -slopes[:, None, None] * distance
    return torch.where(attention_mask[:, None, None, :].bool(), bias[None], torch.finfo(dtype).min)


def _slopes(heads: int) -> list[float]:
    """Returns the slope of each head: a geometric sequence, then every second slope for twice the number of heads."""
    power = 2 ** math.floor(math.log2(heads))
    start = 2 ** (-8 / power)
    further = _slopes(2 * power)[::2][: heads - power] if heads > power else []
    return [start ** (number + 1) for number in range(power)] + further


# transformers 4 has no Nomic BERT, but this module can be imported there.
_Config: Any = getattr(transformers, "NomicBertConfig", transformers.PretrainedConfig)
_Model: Any = getattr(transformers, "NomicBertModel", transformers.PreTrainedModel)


class NomicExpertsConfig(_Config):
    """Layers 1, 1 + `moe_every_n_layers` and so on have `num_experts` experts, of which a token takes `moe_top_k`."""

    model_type = "nomic_experts"

    num_experts: int = 8
    moe_top_k: int = 2
    moe_every_n_layers: int = 2


class _ExpertRouter(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self._top_k = config.moe_top_k

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Computes the weight of each expert for each token, [tokens, experts]; 0 for experts that a token skips."""
        weights = self.layer(vectors).softmax(-1)
        best, chosen = weights.topk(self._top_k, dim=-1)
        return torch.zeros_like(weights).scatter(-1, chosen, best)


class _Networks(torch.nn.Module):
    """The weights of all experts, joined along the first axis."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows = config.num_experts * config.intermediate_size
        self.w1, self.w2 = (torch.nn.Parameter(torch.empty(rows, config.hidden_size)) for _ in range(2))


class _Experts(torch.nn.Module):
    # Whether each expert computes its own tokens only, for graphs whose shapes are free. In a graph of fixed shapes
    # each expert computes all tokens.
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
        self.router = _ExpertRouter(config)
        self.experts = _Experts(config)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        flat = vectors.flatten(0, 1)
        return self.experts(flat, self.router(flat)).view(vectors.shape)


class NomicExpertsModel(_Model):
    """Nomic BERT with experts.

    Source: modeling_hf_nomic_bert.py of nomic-bert-2048, as text-embeddings-inference computes it (nomic.rs). Experts
    are weighted by the router's softmax, which is not normalized again over the best experts.
    """

    config_class = NomicExpertsConfig

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer)
        width = config.hidden_size
        for number, layer in enumerate(self.layers):
            has_experts = number % config.moe_every_n_layers == 1
            layer.mlp = _ExpertLayer(config) if has_experts else CLIPMLP(config)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, torch.nn.Linear(width, width))
        self.post_init()


def taking_rows(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Makes parts compute the rows only that they need: experts their tokens, a GLiNER's scorer the labels of a batch.

    Experts took 0.4 of the time (OpenVINO, measured 2026-11-24).
    """
    return replacing(*((part, "takes_rows", True) for part in module.modules() if hasattr(part, "takes_rows")))


OWN_GRAPHS = (*JINA_BERTS, NomicExpertsModel.__name__)


def register_own_graphs() -> None:
    """Registers our graphs with transformers' automatic classes. Every process that loads models has to call it."""
    register_static_embeddings()
    transformers.AutoConfig.register(JinaBertConfig.model_type, JinaBertConfig, exist_ok=True)
    for auto_class, model in zip(
        (transformers.AutoModel, transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification),
        JINA_BERTS.values(),
        strict=True,
    ):
        auto_class.register(JinaBertConfig, model, exist_ok=True)
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
