"""Attention as T5 has it: it adds biases by distance, which the layers of a decoder share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from neuronpipe.compiler.encoder_decoders import is_t5


def biases_by_distance(model: Any) -> torch.Tensor | None:
    """What a decoder adds to the scores of a token so far before, [distances, heads]; None if it adds nothing.

    All distances from the last one on have the same.
    """
    if (attention := _biased(model)) is None:
        return None
    most = attention.relative_attention_max_distance
    buckets = attention._relative_position_bucket(
        -torch.arange(most + 1),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=most,
    )
    biases: torch.Tensor = attention.relative_attention_bias.weight.detach()[buckets]
    return biases


@contextmanager
def without_biases(model: Any) -> Iterator[None]:
    """Its decoder adds none: the mask has them already."""
    if (attention := _biased(model)) is None:
        yield
        return
    attention.has_relative_attention_bias = False
    try:
        yield
    finally:
        attention.has_relative_attention_bias = True


@contextmanager
def attending_by(model: Any, attend: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """A function computes the attention of its decoder, without biases. `attend`: see transformers.AttentionInterface.

    That of transformers 4 is not a function that can be replaced; of models that are not as T5, it stays what it is.
    """
    blocks = model.get_decoder().block if is_t5(model) else ()
    replaced = [one for block in blocks for one in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention)]
    for attention in replaced:
        attention.forward = partial(_attended, attention, attend)
    try:
        yield
    finally:
        for attention in replaced:
            del attention.forward


def _biased(model: Any) -> Any:
    return model.get_decoder().block[0].layer[0].SelfAttention if is_t5(model) else None


def _attended(
    attention: Any,
    attend: Callable[..., tuple[torch.Tensor, None]],
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None, None]:
    """See T5Attention.forward: what is computed, the biases and the weights."""

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, attention.key_value_proj_dim)).transpose(1, 2)

    source = hidden_states if key_value_states is None else key_value_states
    query, key, value = heads(attention.q(hidden_states)), heads(attention.k(source)), heads(attention.v(source))
    found, _ = attend(attention, query, key, value, None, scaling=1.0)
    return attention.o(found.flatten(2)), None, None
