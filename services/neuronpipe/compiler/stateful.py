"""Graphs with key-value caches inside, as OpenVINO's transformation to a paged graph looks for them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

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
