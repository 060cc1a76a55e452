"""Longformer as one graph for all lengths: full attention under a mask that leaves out what is beyond a token's window.

transformers cuts texts into windows by their length in Python, which a trace cannot hold. The result is the same; the
mask has a number for each pair of a text's tokens. Source: modeling_longformer.py.
"""

import types
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling


def mask_windows(model: Any) -> None:
    """Changes a Longformer of any head."""
    encoder = model.base_model
    encoder.forward = types.MethodType(_encode, encoder)
    if type(model).__name__ == "LongformerForQuestionAnswering":
        model.register_forward_pre_hook(_see_questions, with_kwargs=True)


def _see_questions(model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The tokens of the question, which are those before the first separator, see all others and are seen by them."""
    is_separator = inputs["input_ids"] == model.config.sep_token_id
    return args, inputs | {"global_attention_mask": (is_separator.cumsum(dim=1) == 0).to(torch.int64)}


def _encode(
    encoder: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    global_attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    **ignored: Any,
) -> LongformerBaseModelOutputWithPooling:
    """In place of LongformerModel.forward. `global_attention_mask`: 1 for tokens that see all, and are seen by all."""
    vectors = encoder.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
    is_text = attention_mask.bool()
    is_global = None if global_attention_mask is None else global_attention_mask.bool() & is_text
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    distance = (positions[:, None] - positions[None, :]).abs()
    for layer in encoder.encoder.layer:
        own = layer.attention.self
        is_near = (distance <= own.one_sided_attn_window_size)[None]
        if is_global is not None:
            is_near = is_near | is_global[:, None, :]
        # Padding sees itself: of nothing a softmax is NaN.
        seen = is_near & is_text[:, None, :] | (distance == 0)[None]
        attended = _attend((own.query, own.key, own.value), own.num_heads, vectors, seen)
        if is_global is not None:
            parts = own.query_global, own.key_global, own.value_global
            of_all = _attend(parts, own.num_heads, vectors, is_text[:, None, :])
            attended = torch.where(is_global[:, :, None], of_all, attended)
        attended = layer.attention.output(attended, vectors)
        vectors = layer.output(layer.intermediate(attended), attended)
    pooled = None if encoder.pooler is None else encoder.pooler(vectors)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=vectors, pooler_output=pooled)


def _attend(
    projections: tuple[torch.nn.Module, ...], heads: int, vectors: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention of vectors [batch, tokens, width] to where `seen`, bool [batch or 1, tokens or 1, tokens], is true."""
    shape = (*vectors.shape[:2], heads, -1)
    query, key, value = (projection(vectors).view(shape).transpose(1, 2) for projection in projections)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    return attended.transpose(1, 2).reshape(vectors.shape)
