"""Graphs with key-value caches inside, as OpenVINO's transformation to a paged graph looks for them.

A model with an encoder and a decoder has two graphs. The encoder's graph ends in the cross keys and values of every
layer of the decoder, which are computed once for a text. In the decoder's graph they are caches like those of its own
tokens: OpenVINO makes only attention with a growing cache a paged one, so each token brings the cross keys and values
of the source's last token (stages/neuron_executor/runtimes/paged.py). Attention as T5 has it adds biases by distance,
which the layers of a decoder share.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from neuronpipe.stages.neuron_executor.runtimes.decoder import ENCODER, MODEL
from neuronpipe.stages.neuron_executor.runtimes.openvino import apply_make_stateful_transformation, openvino, opset13

# Heads, width of the keys and of the values of each cache.
Shapes = Sequence[tuple[int, int, int]]


def cache_of(arrays: Sequence[torch.Tensor]) -> DynamicCache:
    """The cache with these keys and values, in turns. It is filled without concatenating an empty tensor."""
    cache = DynamicCache()
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values = keys, values
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        cache.layers.append(layer)
    return cache


def shapes_of(cache: Cache) -> list[tuple[int, int, int]]:
    """The shapes of a cache that was filled."""
    return [(one.keys.shape[1], one.keys.shape[3], one.values.shape[3]) for one in cache.layers]


def arrays_of(cache: Cache) -> Iterator[torch.Tensor]:
    """The keys and values of a cache, in turns."""
    for layer in cache.layers:
        yield layer.keys
        yield layer.values


def causal_mask(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """The mask of `new` tokens, in four dimensions, which transformers takes as it is; its own cannot be traced."""
    total = attention_mask.shape[1]
    is_before = torch.arange(total)[None, :] <= (total - new + torch.arange(new))[:, None]
    is_seen = is_before[None, None] & attention_mask[:, None, None, :].bool()
    return torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)


def placing(position_ids: torch.Tensor) -> Any:
    """A hook that makes a positional embedding one of these positions: transformers has the same for all rows."""

    def place(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(position_ids + getattr(module, "offset", 0), module.weight)

    return place


def traced(
    step: torch.nn.Module, shapes: Shapes, further: Mapping[str, tuple[torch.Tensor, Sequence[int], Any]] | None = None
) -> Any:
    """The stateful graph of a step with the inputs input_ids, attention_mask, position_ids, beam_idx and scored_rows.

    `further`: other inputs by name: an example for two rows, shape and type.
    """
    rows, before, new = 2, 3, 2
    past = [torch.randn(rows, heads, before, width) for heads, *widths in shapes for width in widths]
    integer = openvino.Type.i64
    inputs: dict[str, tuple[torch.Tensor, Sequence[int], Any]] = {
        "input_ids": (torch.zeros(rows, new, dtype=torch.int64), [-1, -1], integer),
        "attention_mask": (torch.ones(rows, before + new, dtype=torch.int64), [-1, -1], integer),
        "position_ids": (torch.arange(before, before + new).expand(rows, new).contiguous(), [-1, -1], integer),
        "beam_idx": (torch.arange(rows), [-1], integer),
        "scored_rows": (torch.arange(rows), [-1], integer),
        **(further or {}),
    }
    for name, array in zip(_state_names("past", shapes), past, strict=True):
        inputs[name] = (array, [-1, array.shape[1], -1, array.shape[3]], openvino.Type.f32)
    graph = converted(step, *(example for example, _, _ in inputs.values()))
    for port, (name, (_, shape, kind)) in zip(graph.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
        port.get_node().set_element_type(kind)
    for port, name in zip(graph.outputs, ["logits", *_state_names("present", shapes)], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    _make_stateful(graph, shapes)
    return graph


def converted(module: torch.nn.Module, *example: torch.Tensor) -> Any:
    """The graph of a module."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of every Python value that the tracer treats as constant, as in openvino.py
        return openvino.convert_model(module.eval(), example_input=example)


def _state_names(word: str, shapes: Shapes) -> list[str]:
    return [f"{word}.{layer}.{kind}" for layer in range(len(shapes)) for kind in ("key", "value")]


def _make_stateful(graph: Any, shapes: Shapes) -> None:
    """Keeps the cache inside the graph, empty at first. The paged transformation looks for such a begin."""
    apply_make_stateful_transformation(
        graph, dict(zip(_state_names("past", shapes), _state_names("present", shapes), strict=True))
    )
    rows = opset13.gather(
        opset13.shape_of(graph.input("input_ids"), output_type="i64"), opset13.constant([0]), opset13.constant(0)
    )
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            axes = [
                opset13.constant(np.array([axis.min_length])) for axis in list(node.get_output_partial_shape(0))[1:]
            ]
            empty = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat([rows, *axes], axis=0))
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


# The methods of transformers 4 that make masks, and which of their arguments is the mask.
_MAKING_MASKS = {"invert_attention_mask": 0, "_update_full_mask": 0, "_update_cross_attn_mask": 1}


def graphs(model: Any) -> dict[str, Any]:
    """The graphs by the names of their files. Raises what transformers and OpenVINO raise for a model that has none."""
    with torch.inference_mode():
        _, cache = read(model, torch.tensor([[0, 0]]))
    own, cross = shapes_of(cache.self_attention_cache), shapes_of(cache.cross_attention_cache)
    if [heads for heads, *_ in own] != [heads for heads, *_ in cross] or own != cross:
        raise ValueError("attention to the source has other shapes than that to the text")
    heads, width = own[0][:2]
    last = (torch.randn(2, 2 * len(cross), heads, width), [-1, 2 * len(cross), heads, width], openvino.Type.f32)
    decoder = traced(_Step(model), [*own, *cross], {"source_last": last})
    return {MODEL: decoder, ENCODER: encoder_graph(model)}


def encoder_graph(model: Any) -> Any:
    """OpenVINO's graph of a model's encoder; see Encoder."""
    graph = converted(Encoder(model), torch.zeros(1, 5, dtype=torch.int64))
    graph.inputs[0].get_node().set_partial_shape(openvino.PartialShape([1, -1]))
    graph.validate_nodes_and_infer_types()
    return graph


def read(
    model: Any, input_ids: torch.Tensor, source_mask: torch.Tensor | None = None
) -> tuple[Any, EncoderDecoderCache]:
    """What a model computes of a source, and the caches after one token.

    `source_mask`: [1, 1, 1, tokens], 0 for what is part of the source; None if all is.
    """
    seen = torch.zeros(1, 1, 1, 1, dtype=model.dtype)
    # The encoder of T5 in transformers 4 takes no mask of four dimensions.
    if is_t5(model):
        of_encoder = None if source_mask is None else (source_mask[:, 0, 0] == 0).long()
    else:
        of_encoder = seen if source_mask is None else source_mask
    encoder, handles = model.get_encoder(), []
    if hasattr(encoder, "embed_positions"):
        place = placing(torch.arange(input_ids.shape[1])[None])
        handles.append(encoder.embed_positions.register_forward_hook(place))
    try:
        with masks_as_given(model):
            hidden = encoder(input_ids=input_ids, attention_mask=of_encoder, return_dict=True)["last_hidden_state"]
    finally:
        for handle in handles:
            handle.remove()
    cache = EncoderDecoderCache(*(Cache(layer_class_to_replicate=_Kept) for _ in range(2)))
    with masks_as_given(model):
        result = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=seen if source_mask is None else source_mask,
            decoder_input_ids=input_ids[:, :1],
            decoder_attention_mask=seen,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
    return result, cache


def is_t5(model: Any) -> bool:
    """Whether its layers are built as T5's, in blocks that share position biases."""
    return model.config.is_encoder_decoder and hasattr(model.get_decoder(), "block")


@contextmanager
def masks_as_given(model: Any) -> Iterator[None]:
    """Masks in four dimensions are taken as they are.

    Models of transformers 4 would make them of others, of ones and zeros in two dimensions.
    """
    parts = (model.get_encoder(), model.get_decoder()) if model.config.is_encoder_decoder else ()
    replaced = [(part, name, index) for part in parts for name, index in _MAKING_MASKS.items() if hasattr(part, name)]
    for part, name, index in replaced:
        setattr(part, name, lambda *given, index=index: given[index])
    try:
        yield
    finally:
        for part, name, _ in replaced:
            delattr(part, name)


class _Kept(DynamicLayer):
    """A cache of a single step. The original would concatenate an empty tensor, which cannot be converted."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **further: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class Encoder(torch.nn.Module):
    """From a source's tokens, [1, tokens], to cross keys and values in turns: [2 * layers, heads, tokens, width]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        _, cache = read(self.model, input_ids)
        return torch.cat(list(arrays_of(cache.cross_attention_cache)))


class _Step(torch.nn.Module):
    """The decoder as a function of its tokens and its caches: first those of its own tokens, then those of sources.

    See decoders.py for `scored_rows`. `source_last`, float32 [rows, 2 * layers, heads, width]: cross keys and values of
    the last token of each row's source, in turns; those of the tokens before are in the caches.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        scored_rows: torch.Tensor,
        source_last: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        arrays = [array.index_select(0, beam_idx) for array in past]
        own, before = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
        cross = [torch.cat([array, source_last[:, index].unsqueeze(2)], 2) for index, array in enumerate(before)]
        cache = EncoderDecoderCache(cache_of(own), cache_of(cross))
        cache.is_updated = dict.fromkeys(range(len(cross) // 2), True)

        def choose(module: torch.nn.Module, args: Any, output: Any) -> Any:
            output["last_hidden_state"] = output["last_hidden_state"].index_select(0, scored_rows)
            return output

        decoder = self.model.get_decoder()
        handles = [
            decoder.embed_positions.register_forward_hook(placing(position_ids)),
            decoder.register_forward_hook(choose),
        ]
        try:
            with masks_as_given(self.model):
                result = self.model(
                    encoder_outputs=BaseModelOutput(last_hidden_state=torch.zeros(1, 1, 1)),
                    attention_mask=torch.zeros(1, 1, 1, 1),
                    decoder_input_ids=input_ids,
                    decoder_attention_mask=causal_mask(attention_mask, input_ids.shape[1]),
                    past_key_values=cache,
                    use_cache=True,
                    return_dict=True,
                )
        finally:
            for handle in handles:
                handle.remove()
        presents = (*arrays_of(cache.self_attention_cache), *arrays_of(cache.cross_attention_cache))
        return (result["logits"][:, -1], *presents)


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
