"""The step of a model as a graph that gathers the keys and values of each row from blocks.

Its other half is stages/neuron_executor/runtimes/decoders.py.
All that attention depends on, position biases too, is in the mask, which is computed from where tokens are.
"""

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.functional import embedding
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from neuronpipe.compiler import stateful
from neuronpipe.compiler.architectures import layer_windows, masks_by_kind
from neuronpipe.compiler.stateful import (
    arrays_of,
    biases_by_distance,
    cache_of,
    converted,
    placing,
    shapes_of,
    without_biases,
)
from neuronpipe.stages.neuron_executor.runtimes.decoder import BLOCK_TOKENS, ENCODER, GATHERED
from neuronpipe.stages.neuron_executor.runtimes.openvino import openvino

# Of an example for tracers: no two are equal, and none is 1.
_ROWS, _NEW, _MOST, _SOURCE, _BLOCKS = 2, 3, 4, 5, 7


class GatheredStep(torch.nn.Module):
    """A model as a function of new tokens of rows, and of what they have in blocks.

    Inputs: see `_inputs` in stages/neuron_executor/runtimes/decoders.py, and the cache. Outputs: logits, [rows,
    vocabulary], after the last token of each row; keys and values of the new tokens, [rows, new, 2 * layers, heads,
    width].
    """

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model whose layers have keys and values of several shapes."""
        super().__init__()
        self.model = model
        own, cross = _shapes(model)
        if len({*own, *cross}) != 1 or own[0][1] != own[0][2]:
            raise ValueError("keys and values of several shapes")
        self.parts, (self.heads, self.width, _) = 2 * len(own), own[0]
        self.has_source = bool(cross)
        # What attention adds to scores by how far a token is, [distances, heads], if it adds anything.
        self.by_distance = biases_by_distance(model)

    def example(self) -> dict[str, torch.Tensor]:
        """Inputs to trace it with."""
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
        own = cache_of([self._gathered(cache, part, blocks) for part in range(self.parts)])
        before = blocks.shape[1] * BLOCK_TOKENS
        new = past[:, None] + torch.arange(input_ids.shape[1], device=past.device)
        places = torch.arange(before, device=past.device)[None].expand(past.shape[0], -1)
        is_filled = torch.cat([places < past[:, None], torch.ones_like(new, dtype=torch.bool)], 1)
        distances = new[:, :, None] - torch.cat([places, new], 1)[:, None]  # [rows, new, before + new]
        biases = None
        if self.by_distance is not None:
            most = len(self.by_distance) - 1
            biases = embedding(distances.clamp(0, most), self.by_distance).permute(0, 3, 1, 2)
        mask = self._mask(is_filled[:, None] & (distances >= 0), distances, cache.dtype, biases)
        if source_tokens is None or source_blocks is None:
            logits = self._decode(input_ids, mask, new, own)
        else:
            held = torch.arange(source_blocks.shape[1] * BLOCK_TOKENS, device=past.device)
            of_source = _mask((held[None] < source_tokens[:, None])[:, None], cache.dtype)
            cross = [self._gathered(cache, part, source_blocks) for part in range(self.parts)]
            both = EncoderDecoderCache(own, cache_of(cross))
            both.is_updated = dict.fromkeys(range(self.parts // 2), True)
            logits = self._decode(input_ids, mask, new, both, of_source)
        added = [array[:, :, before:].transpose(1, 2) for array in arrays_of(own)]
        return logits, torch.stack(added, 2)

    def _mask(
        self, is_seen: torch.Tensor, distances: torch.Tensor, dtype: torch.dtype, biases: torch.Tensor | None
    ) -> Any:
        """The mask of the new tokens, or one for each kind of layers. `is_seen`, `distances`: as in `forward`."""
        if self.has_source:
            return _mask(is_seen, dtype, biases)
        windows = {*layer_windows(self.model.config)}
        masks = {window: _mask(is_seen & (distances < window) if window else is_seen, dtype) for window in windows}
        return masks_by_kind(self.model.config, masks)

    def _gathered(self, cache: torch.Tensor, part: int, blocks: torch.Tensor) -> torch.Tensor:
        """Keys or values of a layer, [rows, heads, tokens, width]. Blocks of a head are rows of a table."""
        heads = torch.arange(self.heads, device=blocks.device)[None, :, None]
        rows = (part * cache.shape[1] + blocks[:, None]) * self.heads + heads
        found = embedding(rows, cache.reshape(-1, BLOCK_TOKENS * self.width))
        return found.reshape(blocks.shape[0], self.heads, -1, self.width)

    def _decode(
        self,
        input_ids: torch.Tensor,
        mask: Any,
        positions: torch.Tensor,
        cache: DynamicCache | EncoderDecoderCache,
        of_source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def choose(module: torch.nn.Module, args: Any, output: Any) -> Any:
            output["last_hidden_state"] = output["last_hidden_state"][:, -1:]
            return output

        with ExitStack() as stack:
            decoder = self.model.get_decoder() if self.has_source else self.model.base_model
            handles = [decoder.register_forward_hook(choose)]
            if self.has_source and hasattr(decoder, "embed_positions"):
                handles.append(decoder.embed_positions.register_forward_hook(placing(positions)))
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(stateful.masks_as_given(self.model))
            stack.enter_context(without_biases(self.model))
            if of_source is None:
                given = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
            else:
                unread = torch.zeros(1, 1, 1, dtype=of_source.dtype, device=of_source.device)
                given = {
                    "encoder_outputs": BaseModelOutput(last_hidden_state=unread),
                    "attention_mask": of_source,
                    "decoder_input_ids": input_ids,
                    "decoder_attention_mask": mask,
                }
            result = self.model(**given, past_key_values=cache, use_cache=True, return_dict=True)
        logits: torch.Tensor = result["logits"][:, -1]
        return logits


def graphs(model: Any) -> dict[str, Any]:
    """OpenVINO's graphs by the names of their files. Raises what transformers and OpenVINO raise."""
    step = GatheredStep(model)
    example = step.example()
    graph = converted(step, *example.values())
    for port, (name, array) in zip(graph.inputs, example.items(), strict=True):
        free = [1] if name == "cache" else range(array.dim())
        shape = [-1 if axis in free else length for axis, length in enumerate(array.shape)]
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
        port.get_node().set_element_type(openvino.Type.f32 if name == "cache" else openvino.Type.i64)
    for port, name in zip(graph.outputs, ("logits", "new"), strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    return {GATHERED: graph} | ({ENCODER: stateful.encoder_graph(model)} if step.has_source else {})


def programs(model: Any) -> dict[str, Any]:
    """PyTorch's exported programs by the names of their files. Raises what transformers and PyTorch raise."""
    step = GatheredStep(model).eval()
    example = step.example()
    free = {
        name: dict.fromkeys((1,) if name == "cache" else range(array.dim()), torch.export.Dim.DYNAMIC)
        for name, array in example.items()
    }
    exported = {GATHERED: _exported(step, example, free)}
    if step.has_source:
        source = {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}
        exported[ENCODER] = _exported(
            stateful.Encoder(model).eval(), source, {"input_ids": {1: torch.export.Dim.DYNAMIC}}
        )
    return exported


def _exported(module: torch.nn.Module, example: dict[str, torch.Tensor], free: dict[str, Any]) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (), kwargs=example, dynamic_shapes=free, strict=False)


def _shapes(model: Any) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Heads, width of the keys and of the values of each layer, of the text and of the source."""
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            _, cache = stateful.read(model, torch.tensor([[0, 0]]))
            return shapes_of(cache.self_attention_cache), shapes_of(cache.cross_attention_cache)
        own = DynamicCache()
        model(input_ids=torch.tensor([[0, 0]]), past_key_values=own, use_cache=True)
        return shapes_of(own), []


def _mask(is_seen: torch.Tensor, dtype: torch.dtype, biases: torch.Tensor | None = None) -> torch.Tensor:
    """What is added to scores, [rows, heads or 1, new or 1, tokens]. `is_seen`: [rows, new or 1, tokens]."""
    seen = torch.zeros((), dtype=dtype, device=is_seen.device) if biases is None else biases
    return torch.where(is_seen[:, None], seen, torch.finfo(dtype).min)
