"""The step of a model that generates as a graph over a cache in blocks, in two forms, and the graph of its encoder.

The paged form is a stateful graph with caches inside, as OpenVINO's transformation to a paged graph expects it.
stages/neuron_executor/runtimes/paged.py runs it. The gathered form gathers the keys and values of each row from blocks
by itself, for OpenVINO and for PyTorch. stages/neuron_executor/runtimes/decoders.py runs it.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding

from neuronpipe.compiler.architectures import added_to_scores, layer_windows, masks_by_kind
from neuronpipe.compiler.decoding import (
    CrossCacheEncoder,
    Shapes,
    arrays_of,
    biases_by_distance,
    cache_of,
    cache_shapes,
    caches_of,
    decode,
)
from neuronpipe.stages.neuron_executor.runtimes.decoder import BLOCK_TOKENS, ENCODER, GATHERED, MODEL
from neuronpipe.stages.neuron_executor.runtimes.openvino import (
    apply_make_stateful_transformation,
    openvino,
    opset13,
    traced,
)
from neuronpipe.stages.neuron_executor.runtimes.paged import set_windows


class _PagedStep(torch.nn.Module):
    """A decoder as a function of its tokens and its caches, with scores for some rows only.

    In the stateful graph a row is a sequence. In the paged graph a row is a token, so that `scored_rows`, int64
    [scored], chooses the tokens with logits. With an encoder, the caches of sources follow the caches of texts.
    OpenVINO only makes caches paged that grow. So each token brings the cross keys and values of the last token of its
    row's source, `source_last`, float32 [rows, 2 * layers, heads, width]; the caches contain the tokens before.
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
        *further: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        new, total = input_ids.shape[1], attention_mask.shape[1]
        # transformers takes a mask of four dimensions as it is; its own mask cannot be traced.
        is_before = torch.arange(total)[None, :] <= (total - new + torch.arange(new))[:, None]
        mask: Any = added_to_scores(is_before[None, None] & attention_mask[:, None, None, :].bool(), torch.float32)
        has_source = bool(self.model.config.is_encoder_decoder)
        arrays = [array.index_select(0, beam_idx) for array in further[has_source:]]
        cache: Any = cache_of(arrays)
        if has_source:
            self_arrays, before = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
            last = (further[0][:, index].unsqueeze(2) for index in range(len(before)))
            cache = caches_of(self_arrays, [torch.cat(pair, 2) for pair in zip(before, last, strict=True)])
        else:  # `set_windows` gives the paged graph its windows
            mask = masks_by_kind(self.model.config, dict.fromkeys(layer_windows(self.model.config), mask))
        of_source = torch.zeros(1, 1, 1, 1) if has_source else None
        choose = partial(torch.index_select, dim=0, index=scored_rows)
        logits = decode(
            model=self.model,
            input_ids=input_ids,
            mask=mask,
            positions=position_ids,
            cache=cache,
            choose=choose,
            of_source=of_source,
        )
        caches = (cache.self_attention_cache, cache.cross_attention_cache) if has_source else (cache,)
        return (logits[:, -1], *(array for part in caches for array in arrays_of(part)))


def paged_graphs(model: Any) -> dict[str, Any]:
    """Converts a decoder to OpenVINO's graphs, by the names of their files.

    Raises the errors of transformers and OpenVINO.
    """
    self_shapes, cross_shapes = cache_shapes(model)
    if cross_shapes and self_shapes != cross_shapes:
        raise ValueError("attention to the source has other shapes than that to the text")
    graph = _stateful(_PagedStep(model), self_shapes, cross_shapes)
    if cross_shapes:
        return {MODEL: graph, ENCODER: _encoder_graph(model)}
    set_windows(graph, layer_windows(model.config))
    return {MODEL: graph}


def _stateful(step: torch.nn.Module, self_shapes: Shapes, cross_shapes: Shapes) -> Any:
    rows, before, new = 2, 3, 2
    shapes = [*self_shapes, *cross_shapes]
    integer, real = openvino.Type.i64, openvino.Type.f32
    # Input → its example of two rows, its shape and its type.
    inputs: dict[str, tuple[torch.Tensor, Sequence[int], Any]] = {
        "input_ids": (torch.zeros(rows, new, dtype=torch.int64), [-1, -1], integer),
        "attention_mask": (torch.ones(rows, before + new, dtype=torch.int64), [-1, -1], integer),
        "position_ids": (torch.arange(before, before + new).expand(rows, new).contiguous(), [-1, -1], integer),
        "beam_idx": (torch.arange(rows), [-1], integer),
        "scored_rows": (torch.arange(rows), [-1], integer),
    }
    if cross_shapes:
        heads, width, _ = cross_shapes[0]
        last = 2 * len(cross_shapes), heads, width
        inputs["source_last"] = torch.randn(rows, *last), [-1, *last], real
    states, presents = (
        [f"{word}.{layer}.{kind}" for layer in range(len(shapes)) for kind in ("key", "value")]
        for word in ("past", "present")
    )
    sizes = [(heads, width) for heads, *widths in shapes for width in widths]
    for name, (heads, width) in zip(states, sizes, strict=True):
        inputs[name] = torch.randn(rows, heads, before, width), [-1, heads, -1, width], real
    graph = _converted(step, *(example for example, _, _ in inputs.values()))
    _describe(graph, {name: (shape, kind) for name, (_, shape, kind) in inputs.items()}, ["logits", *presents])
    # The cache is kept inside the graph, empty at first: the paged transformation looks for such a start.
    apply_make_stateful_transformation(graph, dict(zip(states, presents, strict=True)))
    count = opset13.gather(
        opset13.shape_of(graph.input("input_ids"), output_type="i64"), opset13.constant([0]), opset13.constant(0)
    )
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            axes = [
                opset13.constant(np.array([axis.min_length])) for axis in list(node.get_output_partial_shape(0))[1:]
            ]
            empty = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat([count, *axes], axis=0))
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()
    return graph


# Sizes of an example for tracers: no two are equal, and none is 1.
_ROWS, _NEW, _MOST, _SOURCE, _BLOCKS = 2, 3, 4, 5, 7


class _GatheredStep(torch.nn.Module):
    """A model as a function of the new tokens of rows, and of the cached tokens of the rows in blocks.

    Inputs: see `_inputs` in stages/neuron_executor/runtimes/decoders.py, and the cache. Outputs: logits, [rows,
    vocabulary], after the last token of each row; keys and values of the new tokens, [rows, new, 2 * layers, heads,
    width]. The mask, computed from the places of tokens, contains all that attention depends on, also position biases.
    """

    def __init__(self, model: Any) -> None:
        """Raises ValueError if the model's layers have keys and values of several shapes."""
        super().__init__()
        self.model = model
        self_shapes, cross_shapes = cache_shapes(model)
        if len({*self_shapes, *cross_shapes}) != 1 or self_shapes[0][1] != self_shapes[0][2]:
            raise ValueError("keys and values of several shapes")
        self.parts, (self.heads, self.width, _) = 2 * len(self_shapes), self_shapes[0]
        self.has_source = bool(cross_shapes)
        # The biases that attention adds to scores by the distance of a token, [distances, heads], or None.
        self.by_distance = biases_by_distance(model)

    def example(self) -> dict[str, torch.Tensor]:
        inputs = {
            "input_ids": torch.zeros(_ROWS, _NEW, dtype=torch.int64),
            "past": torch.tensor([5, 40]),
            "blocks": torch.arange(_ROWS * _MOST).reshape(_ROWS, _MOST) % _BLOCKS,
            "cache": torch.zeros(self.parts, _BLOCKS, self.heads, BLOCK_TOKENS, self.width, dtype=self.model.dtype),
        }
        if self.has_source:
            inputs["source_tokens"] = torch.tensor([33, 70])
            inputs["source_blocks"] = torch.arange(_ROWS * _SOURCE).reshape(_ROWS, _SOURCE) % _BLOCKS
        return inputs

    def forward(
        self,
        input_ids: torch.Tensor,
        past: torch.Tensor,
        blocks: torch.Tensor,
        cache: torch.Tensor,
        source_tokens: torch.Tensor | None = None,
        source_blocks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.model.config
        held: Any
        self_cache = held = cache_of(self._gathered(cache, blocks))
        before = blocks.shape[1] * BLOCK_TOKENS
        new = past[:, None] + torch.arange(input_ids.shape[1], device=past.device)
        places = torch.arange(before, device=past.device)[None].expand(past.shape[0], -1)
        is_filled = torch.cat([places < past[:, None], torch.ones_like(new, dtype=torch.bool)], 1)
        distances = new[:, :, None] - torch.cat([places, new], 1)[:, None]  # [rows, new, before + new]
        is_seen = is_filled[:, None] & (distances >= 0)
        of_source = None
        if source_tokens is None or source_blocks is None:
            windows = {*layer_windows(config)}
            seen = {window: is_seen & (distances < window) if window else is_seen for window in windows}
            masks = {window: added_to_scores(is_in[:, None], cache.dtype) for window, is_in in seen.items()}
            mask = masks_by_kind(config, masks)
        else:
            biases: torch.Tensor | float = 0.0
            if self.by_distance is not None:
                max_distance = len(self.by_distance) - 1
                biases = embedding(distances.clamp(0, max_distance), self.by_distance).permute(0, 3, 1, 2)
            mask = added_to_scores(is_seen[:, None], cache.dtype, biases)  # [rows, heads or 1, new, tokens]
            read = torch.arange(source_blocks.shape[1] * BLOCK_TOKENS, device=past.device)
            of_source = added_to_scores((read[None] < source_tokens[:, None])[:, None, None], cache.dtype)
            held = caches_of(list(arrays_of(self_cache)), self._gathered(cache, source_blocks))
            self_cache = held.self_attention_cache
        logits = decode(
            model=self.model,
            input_ids=input_ids,
            mask=mask,
            positions=new,
            cache=held,
            choose=lambda vectors: vectors[:, -1:],
            of_source=of_source,
        )
        added = [array[:, :, before:].transpose(1, 2) for array in arrays_of(self_cache)]
        return logits[:, -1], torch.stack(added, 2)

    def _gathered(self, cache: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Gathers the keys and values of the layers in turns, [rows, heads, tokens, width].

        A head's blocks are rows of a table.
        """
        table = cache.reshape(-1, BLOCK_TOKENS * self.width)
        heads = torch.arange(self.heads, device=blocks.device)[None, :, None]
        gathered = [
            embedding((part * cache.shape[1] + blocks[:, None]) * self.heads + heads, table)
            for part in range(self.parts)
        ]
        return [vectors.reshape(blocks.shape[0], self.heads, -1, self.width) for vectors in gathered]


def gathered_graphs(model: Any) -> dict[str, Any]:
    """Converts a decoder to OpenVINO's graphs, by the names of their files.

    Raises the errors of transformers and OpenVINO.
    """
    step = _GatheredStep(model)
    example = step.example()
    graph = _converted(step, *example.values())
    inputs = {}
    for name, array in example.items():
        free = [1] if name == "cache" else range(array.dim())
        shape = [-1 if axis in free else length for axis, length in enumerate(array.shape)]
        inputs[name] = shape, openvino.Type.f32 if name == "cache" else openvino.Type.i64
    _describe(graph, inputs, ["logits", "new"])
    return {GATHERED: graph} | ({ENCODER: _encoder_graph(model)} if step.has_source else {})


def exported_programs(model: Any) -> dict[str, Any]:
    """Exports a decoder as PyTorch programs, by the names of their files. Raises errors of transformers and PyTorch."""
    step = _GatheredStep(model).eval()
    example, dynamic = step.example(), torch.export.Dim.DYNAMIC
    free = {
        name: dict.fromkeys((1,) if name == "cache" else range(array.dim()), dynamic) for name, array in example.items()
    }
    exported = {GATHERED: _exported(step, example, free)}
    if step.has_source:
        source = {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}
        exported[ENCODER] = _exported(CrossCacheEncoder(model).eval(), source, {"input_ids": {1: dynamic}})
    return exported


def _exported(module: torch.nn.Module, example: dict[str, torch.Tensor], free: dict[str, Any]) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (), kwargs=example, dynamic_shapes=free, strict=False)


def _encoder_graph(model: Any) -> Any:
    graph = _converted(CrossCacheEncoder(model), torch.zeros(1, 5, dtype=torch.int64))
    graph.inputs[0].get_node().set_partial_shape(openvino.PartialShape([1, -1]))
    graph.validate_nodes_and_infer_types()
    return graph


def _converted(module: torch.nn.Module, *example: torch.Tensor) -> Any:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # about Python values that the tracer treats as constant, as in openvino.py
        return traced(module.eval(), example)


def _describe(graph: Any, inputs: Mapping[str, tuple[Sequence[int], Any]], outputs: Sequence[str]) -> None:
    """Names a graph's inputs and outputs. `inputs`: shapes, in which -1 is any length, and types."""
    for port, (name, (shape, kind)) in zip(graph.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
        port.get_node().set_element_type(kind)
    for port, name in zip(graph.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
