"""Jina-BERT v2 (jina-embeddings-v2, jina-reranker-v1): BERT whose attention has distances in place of positions.

transformers has no such model. The parts have the names of the published weights. Sources: the modeling_bert.py of
jina-bert-implementation, and that of jina-bert-v2-qk-post-norm, which has more norms; "Train Short, Test Long" (ALiBi),
arXiv 2108.12409, and the distances in both directions as in arXiv 2310.19923.
"""

import math
from typing import Any

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutputWithPooling

_ACTIVATIONS = {"geglu": torch.nn.functional.gelu, "reglu": torch.nn.functional.relu}
FEED_FORWARD_TYPES = tuple(_ACTIVATIONS)


class JinaBertConfig(transformers.BertConfig):
    """`has_query_norms`: it is one of the second kind, with norms of queries and keys."""

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
        vectors: torch.Tensor = self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))
        return vectors


class _SelfAttention(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        if config.has_query_norms:
            self.layer_norm_q, self.layer_norm_k = _norm(config), _norm(config)

    def forward(self, vectors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(vectors), self.key(vectors), self.value(vectors)
        if self.config.has_query_norms:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        shape = (*vectors.shape[:2], self.config.num_attention_heads, -1)
        query, key, value = (one.view(shape).transpose(1, 2) for one in (query, key, value))
        if self.config._attn_implementation == "eager":
            scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
            seen = torch.softmax(scores + bias, dim=-1) @ value
        else:
            seen = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return seen.transpose(1, 2).reshape(vectors.shape)


class _Output(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = _norm(config)

    def forward(self, seen: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(seen) + vectors)
        return normed


class _Attention(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Output(config)

    def forward(self, vectors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.output(self.self(vectors, bias), vectors)
        return normed


class _FeedForward(torch.nn.Module):
    """The gate is the first half of the first layer's outputs. The norm is its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = torch.nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = _norm(config)
        self.activation = _ACTIVATIONS[config.feed_forward_type]

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        gate, other = self.gated_layers(vectors).chunk(2, dim=-1)
        normed: torch.Tensor = self.layernorm(self.wo(self.activation(gate) * other) + vectors)
        return normed


class _FeedForwardOfNormed(torch.nn.Module):
    """The gate is the second half. The norms are those of the layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_gated_layer = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_layer = torch.nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = _ACTIVATIONS[config.feed_forward_type]

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        other, gate = self.up_gated_layer(vectors).chunk(2, dim=-1)
        result: torch.Tensor = self.down_layer(self.activation(gate) * other)
        return result


class _Layer(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.mlp = _FeedForwardOfNormed(config) if config.has_query_norms else _FeedForward(config)
        if config.has_query_norms:
            self.layer_norm_1, self.layer_norm_2 = _norm(config), _norm(config)

    def forward(self, vectors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(vectors, bias)
        if not isinstance(self.mlp, _FeedForwardOfNormed):
            return torch.as_tensor(self.mlp(attended))
        attended = self.layer_norm_1(vectors + attended)
        return torch.as_tensor(self.layer_norm_2(attended + self.mlp(attended)))


class JinaBertModel(transformers.BertModel):
    """The encoder. Texts of any length: nothing of it is learned for a position."""

    config_class = JinaBertConfig

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.embeddings = _Embeddings(config)
        self.encoder.layer = torch.nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
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


class JinaBertForMaskedLM(transformers.BertForMaskedLM):
    """With the head of a masked language model."""

    config_class = JinaBertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config, add_pooling_layer=False)
        self.post_init()


class JinaBertForSequenceClassification(transformers.BertForSequenceClassification):
    """With the head of a classifier or a reranker."""

    config_class = JinaBertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.post_init()


JINA_BERTS: dict[str, Any] = {
    one.__name__: one for one in (JinaBertModel, JinaBertForMaskedLM, JinaBertForSequenceClassification)
}


def register_jina_bert() -> None:
    """Has transformers' automatic classes know the model."""
    transformers.AutoConfig.register(JinaBertConfig.model_type, JinaBertConfig, exist_ok=True)
    for auto_class, model in zip(
        (transformers.AutoModel, transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification),
        JINA_BERTS.values(),
        strict=True,
    ):
        auto_class.register(JinaBertConfig, model, exist_ok=True)


def _norm(config: Any) -> torch.nn.LayerNorm:
    return torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _bias(attention_mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of attention, [batch, heads, tokens, tokens]: less the further away, none of padding.

    It is as large as the scores themselves: 3.2 GB for a text of 8,192 tokens and 12 heads (docs/performance.md).
    """
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    distance = (positions[:, None] - positions[None, :]).abs().to(dtype)
    slopes = torch.tensor(_slopes(heads), dtype=dtype, device=attention_mask.device)
    bias = -slopes[:, None, None] * distance
    return torch.where(attention_mask[:, None, None, :].bool(), bias[None], torch.finfo(dtype).min)


def _slopes(heads: int) -> list[float]:
    """The slope of each head: a geometric sequence; for other numbers than powers of 2, every second one of the next
    power is put behind it.
    """
    power = 2 ** math.floor(math.log2(heads))
    start = 2 ** (-8 / power)
    further = _slopes(2 * power)[::2][: heads - power] if heads > power else []
    return [start ** (number + 1) for number in range(power)] + further
