"""Runs of a model that generates, over caches of keys and values in the form of transformers.

The graphs are made of these runs: decoder_graphs.py for caches in blocks, slots.py for caches in slots. T5's attention
adds biases by distance, which the layers of a decoder share.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from neuronpipe.compiler.architectures import replacing, taking_masks
from neuronpipe.compiler.modules import choosing

# The number of heads, the width of the keys and the width of the values of each cache.
Shapes = Sequence[tuple[int, int, int]]
# The methods of transformers 4 that make masks, and the index of the argument that is the mask.
_MAKING_MASKS = {"invert_attention_mask": 0, "_update_full_mask": 0, "_update_cross_attn_mask": 1}


def cache_of(arrays: Sequence[torch.Tensor]) -> DynamicCache:
    """Makes a cache of these keys and values, in turns, without concatenating them to an empty tensor."""
    cache = DynamicCache()
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values = keys, values
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        cache.layers.append(layer)
    return cache


def caches_of(self_arrays: Sequence[torch.Tensor], cross_arrays: Sequence[torch.Tensor]) -> EncoderDecoderCache:
    """Makes the caches of the keys and values of a text and of its source, which are not computed again."""
    caches = EncoderDecoderCache(cache_of(self_arrays), cache_of(cross_arrays))
    caches.is_updated = dict.fromkeys(range(len(cross_arrays) // 2), True)
    return caches


def arrays_of(cache: Cache) -> Iterator[torch.Tensor]:
    """Yields the keys and values of a cache, in turns."""
    for layer in cache.layers:
        yield layer.keys
        yield layer.values


def cache_shapes(model: Any) -> tuple[Shapes, Shapes]:
    """Returns the shapes of a text's caches, and of its source's caches, which a decoder alone lacks."""
    tokens, cross_cache = torch.tensor([[0, 0]]), None
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            caches = read(model, tokens)
            self_cache, cross_cache = caches.self_attention_cache, caches.cross_attention_cache
        else:
            self_cache = DynamicCache()
            model(input_ids=tokens, past_key_values=self_cache, use_cache=True)
    return _shapes_of(self_cache), _shapes_of(cross_cache) if cross_cache is not None else []


def _shapes_of(cache: Cache) -> Shapes:
    if not cache.layers or any(getattr(layer, "keys", None) is None for layer in cache.layers):
        raise ValueError("its layers keep more than keys and values of tokens, as recurrent and state-space layers do")
    return [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]


def decoder_of(model: Any) -> Any:
    """Returns the part of a model that makes the vectors for its head. OPT has this part in its base model."""
    if model.config.is_encoder_decoder:
        return model.get_decoder()
    return getattr(model.base_model, "decoder", model.base_model)


def decode(
    model: Any,
    input_ids: torch.Tensor,
    mask: Any,
    positions: torch.Tensor,
    cache: Cache,
    choose: Callable[[torch.Tensor], torch.Tensor],
    of_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the logits of a decoder after new tokens, which are added to the cache. Biases are in the mask.

    - `mask`: in four dimensions, for the text, or a mask for each kind of layers.
    - `of_source`: in four dimensions, for the source, if there is one source.
    - `choose`: chooses the vectors before the head for which logits are computed.
    """
    decoder = decoder_of(model)
    with ExitStack() as stack:
        stack.enter_context(placing(decoder, positions))
        taken = stack.enter_context(taking_masks(model, mask))
        model_inputs = {"input_ids": input_ids, "attention_mask": taken, "position_ids": positions}
        if of_source is not None:
            unread = torch.zeros(1, 1, 1, dtype=of_source.dtype, device=of_source.device)
            model_inputs = {
                "encoder_outputs": BaseModelOutput(last_hidden_state=unread),
                "attention_mask": of_source,
                "decoder_input_ids": input_ids,
                "decoder_attention_mask": mask,
            }
            for context in (_masks_as_given(model), _without_biases(model)):
                stack.enter_context(context)
        stack.enter_context(choosing(decoder, choose))
        logits: torch.Tensor = model(**model_inputs, past_key_values=cache, use_cache=True, return_dict=True)["logits"]
    return logits


def read(model: Any, input_ids: torch.Tensor, source_mask: torch.Tensor | None = None) -> EncoderDecoderCache:
    """Returns the caches of a model that has read a source, after one token.

    `source_mask`: [1, 1, 1, tokens], or None.
    """
    seen = torch.zeros(1, 1, 1, 1, dtype=model.dtype)
    # The encoder of T5 in transformers 4 takes no mask of four dimensions.
    if _is_t5(model):
        of_encoder = None if source_mask is None else (source_mask[:, 0, 0] == 0).long()
    else:
        of_encoder = seen if source_mask is None else source_mask
    encoder = model.get_encoder()
    cache = EncoderDecoderCache(*(Cache(layer_class_to_replicate=_Kept) for _ in range(2)))
    with _masks_as_given(model):
        with placing(encoder, torch.arange(input_ids.shape[1])[None]):
            hidden = encoder(input_ids=input_ids, attention_mask=of_encoder, return_dict=True)["last_hidden_state"]
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=seen if source_mask is None else source_mask,
            decoder_input_ids=input_ids[:, :1],
            decoder_attention_mask=seen,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
    return cache


class _Kept(DynamicLayer):
    """A cache of a single step. The original would concatenate an empty tensor, which cannot be converted."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **further: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class CrossCacheEncoder(torch.nn.Module):
    """Converts a source's tokens, [1, tokens], to cross keys and values: [2 * layers, heads, tokens, width]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(arrays_of(read(self.model, input_ids).cross_attention_cache)))


@contextmanager
def placing(part: Any, positions: torch.Tensor) -> Iterator[None]:
    """Gives each row its own positions, where an encoder or decoder has a positional embedding."""
    if (placed := getattr(part, "embed_positions", None)) is None:
        yield
        return
    table = placed.weights if hasattr(placed, "weights") else placed.weight
    rows = positions + getattr(placed, "offset", 0)
    with replacing((placed, "forward", lambda *args, **further: embedding(rows, table))):
        yield


def _is_t5(model: Any) -> bool:
    """Returns whether the model's layers are built as T5's layers, in blocks that share position biases."""
    return model.config.is_encoder_decoder and hasattr(model.get_decoder(), "block")


def _masks_as_given(model: Any) -> AbstractContextManager[None]:
    """Makes a model of transformers 4 take masks in four dimensions as they are."""
    parts = (model.get_encoder(), model.get_decoder())
    replaced = [(part, name, index) for part in parts for name, index in _MAKING_MASKS.items() if hasattr(part, name)]
    return replacing(*((part, name, lambda *masks, index=index: masks[index]) for part, name, index in replaced))


def biases_by_distance(model: Any) -> torch.Tensor | None:
    """Returns the biases of a decoder's scores by distance, [distances, heads], or None.

    The last bias is for all longer distances.
    """
    if (attention := _biased(model)) is None:
        return None
    max_distance = attention.relative_attention_max_distance
    buckets = attention._relative_position_bucket(
        -torch.arange(max_distance + 1),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=max_distance,
    )
    return attention.relative_attention_bias.weight.detach()[buckets]


def _without_biases(model: Any) -> AbstractContextManager[None]:
    attention = _biased(model)
    return nullcontext() if attention is None else replacing((attention, "has_relative_attention_bias", False))


def attending_by(model: Any, attend: Callable[..., tuple[torch.Tensor, None]]) -> AbstractContextManager[None]:
    """Makes `attend` (see transformers.AttentionInterface) compute T5's attention, without biases."""
    blocks = model.get_decoder().block if _is_t5(model) else ()
    replaced = [
        attention for block in blocks for attention in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention)
    ]
    return replacing(*((attention, "forward", partial(_attended, attention, attend)) for attention in replaced))


def _biased(model: Any) -> Any:
    return model.get_decoder().block[0].layer[0].SelfAttention if _is_t5(model) else None


def _attended(
    attention: Any,
    attend: Callable[..., tuple[torch.Tensor, None]],
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None, None]:
    """Replaces T5Attention.forward, which returns the vectors, the biases and the weights."""

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, attention.key_value_proj_dim)).transpose(1, 2)

    source = hidden_states if key_value_states is None else key_value_states
    query, key, value = heads(attention.q(hidden_states)), heads(attention.k(source)), heads(attention.v(source))
    attended, _ = attend(attention, query, key, value, None, scaling=1.0)
    return attention.o(attended.flatten(2)), None, None
