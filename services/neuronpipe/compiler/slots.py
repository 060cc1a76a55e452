"""The step of a decoder as a graph of fixed shapes that keeps its cache in slots.

stages/neuron_executor/runtimes/slots.py runs it. All new tokens, one of each slot and a part of one prompt, go through
the layers as one row, so that the weights are read once. Only attention separates them: each token of a slot sees that
slot, and the tokens of the prompt see the prompt's slot. With an encoder, they also see the cross keys and values of a
source, which a graph of its own computes.
"""

import copy
import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutput

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.compiler.architectures import added_to_scores, layer_windows
from neuronpipe.compiler.decoding import (
    Shapes,
    arrays_of,
    attending_by,
    biases_by_distance,
    cache_shapes,
    decoder_of,
    placing,
    read,
)
from neuronpipe.compiler.modules import SourceModule, choosing, pretrained_model
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import TOP_TOKENS, TokenScores
from neuronpipe.stages.neuron_executor.runtimes.slots import CHUNK_TOKENS, SlotModel

_ATTENTION = "neuronpipe-slots"


class SlotStep(torch.nn.Module):
    """A decoder as a function of new tokens, and of the contents of its slots, `states`: keys and values in turns.

    With an encoder, the states of the source in each slot follow the states of texts. Inputs: see SlotGraph. Outputs:
    logits, [slots + 1, vocabulary], the best tokens and their logits, [slots + 1, tops], and the new contents of the
    slots, as `states`.
    """

    def __init__(self, model: Any, slots: int, slot_tokens: int, chunk_tokens: int) -> None:
        """Raises SetupError if the model's attention is not a function of its own."""
        super().__init__()
        self.model = model
        self.slots, self.slot_tokens, self.chunk_tokens = slots, slot_tokens, chunk_tokens
        self.has_encoder = bool(model.config.is_encoder_decoder)
        self_shapes, cross = cache_shapes(model)
        # Each slot has its own states of a source, so that reading a source writes no other slot.
        shapes = [(slots, *shape) for shape in self._state_shapes(self_shapes)]
        self._text_states = len(shapes)
        shapes += slots * [(1, *shape) for shape in self._state_shapes(cross)]
        self.states = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in shapes
        )
        self.register_buffer("by_distance", biases_by_distance(model))
        self.windows = (0,) * len(self_shapes) if self.has_encoder else layer_windows(model.config)
        model.set_attn_implementation(_ATTENTION)

    def _state_shapes(self, shapes: Shapes) -> list[tuple[int, ...]]:
        """Returns the shapes of the keys and values of a slot, in turns."""
        return [(heads, self.slot_tokens, width) for heads, *widths in shapes for width in widths]

    def example(self) -> tuple[torch.Tensor, ...]:
        inputs = (
            torch.zeros(1, self.slots + self.chunk_tokens, dtype=torch.int64),
            torch.zeros(self.slots, dtype=torch.int64),
            torch.tensor([0, 0, 1]),
            torch.arange(self.slots),
        )
        return (*inputs, torch.tensor([[0, 1]] * (self.slots + 1))) if self.has_encoder else inputs

    def aliases(self) -> dict[torch.Tensor, int]:
        """Returns the number of the output that each state becomes."""
        return {state: len(TokenScores._fields) + number for number, state in enumerate(self.states)}

    @property
    def texts(self) -> Sequence[torch.Tensor]:
        """The states of texts, [slots, heads, tokens, width]."""
        return list(self.states)[: self._text_states]

    def sources(self) -> list[list[torch.Tensor]]:
        """Returns the states of the source in each slot, [1, heads, tokens, width]; no list without an encoder."""
        states = list(self.states)[self._text_states :]
        count = len(states) // self.slots
        return [states[first : first + count] for first in range(0, len(states), count or 1)]

    def forward(
        self,
        token_ids: torch.Tensor,
        past: torch.Tensor,
        chunk: torch.Tensor,
        copied: torch.Tensor,
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        step = _RunningStep(self, past, chunk, copied, read)

        running = _running.set(step)
        try:
            with (
                attending_by(self.model, _attention),
                choosing(decoder_of(self.model), lambda vectors: vectors.index_select(1, step.scored)),
            ):
                result = self._computed(token_ids, step.positions)
        finally:
            _running.reset(running)
        seen = len(step.added) + self.slots * step.seen_sources
        if seen != len(self.states):
            raise SetupError(
                f"{type(self.model).__name__} has attention of its own, and cannot be compiled for slots of fixed "
                "shapes"
            )
        logits = result["logits"][0].float()
        top_logits, top_ids = logits.topk(min(TOP_TOKENS, logits.shape[1]))
        scores = (logits, top_ids.int(), top_logits, (logits - top_logits[:, :1]).exp().sum(1).log())
        return *scores, *step.added, *(state for states_of_slot in self.sources() for state in states_of_slot)

    def _computed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        if not self.has_encoder:
            return self.model(input_ids=token_ids, position_ids=positions, use_cache=False, return_dict=True)
        # A source of one token, which no token sees.
        nothing = torch.zeros(1, 1, self.model.config.hidden_size, dtype=self.model.dtype)
        with placing(decoder_of(self.model), positions):
            return self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=nothing),
                decoder_input_ids=token_ids,
                use_cache=False,
                return_dict=True,
            )


class SourceEncoder(torch.nn.Module):
    """Converts `count` tokens of a source, [1, tokens], to cross keys and values in turns, then zeros."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        is_source = torch.arange(token_ids.shape[1]) < count
        mask = added_to_scores(is_source, torch.float32)[None, None, None].to(self.model.dtype)
        cache = read(self.model, token_ids, mask)
        arrays = torch.cat(list(arrays_of(cache.cross_attention_cache)))
        return torch.where(is_source[None, None, :, None], arrays, 0.0)


def source_encoder(module: SourceModule, attention: str) -> SourceEncoder:
    """Makes the graph that reads sources, with an attention of transformers."""
    model = pretrained_model(module.module)
    model.set_attn_implementation(attention)
    encoder = SourceEncoder(model)
    encoder.eval()
    return encoder


def slot_step(module: SourceModule, bucket: Bucket) -> SlotStep:
    """Makes the step of a model with one slot per row of the bucket. A slot holds a token per column of the bucket."""
    step = SlotStep(pretrained_model(module.module), bucket.batch, bucket.tokens, CHUNK_TOKENS)
    step.eval()
    return step


def emulated(module: SourceModule, bucket: Bucket, dtype: str) -> SlotModel:
    """Makes the model as it will run, computed by PyTorch."""
    copied = dataclasses.replace(module, module=copy.deepcopy(module.module))  # the copy gets another attention
    step = slot_step(copied, bucket)
    encoder = source_encoder(module, "eager") if step.has_encoder else None
    return SlotModel(_PyTorchGraph(step, encoder, dtype), bucket.batch, bucket.tokens, CHUNK_TOKENS)


class _PyTorchGraph:
    """Runs a step in PyTorch; see SlotGraph."""

    def __init__(self, step: SlotStep, encoder: SourceEncoder | None, dtype: str) -> None:
        self._step, self._encoder = step, encoder
        self._cast = dtype == "bfloat16"

    def execute(self, *inputs: NDArray[np.int64]) -> TokenScores:
        outputs = self._run(self._step, *map(torch.from_numpy, inputs))
        scores, states = outputs[: len(TokenScores._fields)], outputs[len(TokenScores._fields) :]
        for state, new in zip(self._step.states, states, strict=True):
            state.copy_(new)
        return TokenScores._make(score.numpy() for score in scores)

    def read(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        computed = self._run(self._encoder, torch.from_numpy(token_ids), torch.tensor([count]))
        for state, new in zip(self._step.sources()[slot], computed, strict=True):
            state[0] = new

    def _run(self, module: Any, *inputs: torch.Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._cast):
            return module(*inputs)


class _RunningStep:
    """The places of a step's tokens, and the slots' contents after it: `added`. See SlotGraph for the others."""

    def __init__(
        self, step: SlotStep, past: torch.Tensor, chunk: torch.Tensor, copied: torch.Tensor, read: torch.Tensor | None
    ) -> None:
        slot, before, count = (chunk[index : index + 1] for index in range(3))
        places = torch.arange(step.slot_tokens)
        self.slots, self._texts, self._sources = step.slots, step.texts, step.sources()
        self._slot, self._copied = slot, copied
        in_chunk = before + torch.arange(step.chunk_tokens)
        # Unused tokens also need positions within the limit of the model.
        self.positions = torch.cat([past, in_chunk])[None].clamp(0, step.slot_tokens - 1)
        self.scored = torch.cat([torch.arange(step.slots), step.slots + (count - 1).clamp(min=0)])
        self._gets_chunk = (torch.arange(step.slots) == slot) & (count > 0)
        kept_tokens = torch.where(self._gets_chunk, before, torch.where(past < 0, step.slot_tokens, past))
        new = torch.where(self._gets_chunk, count, (past >= 0).long())
        behind = places[None] - kept_tokens[:, None]  # [slots, tokens]
        self._is_kept, self._is_new = ((is_place[:, None, :, None]) for is_place in (behind < 0, behind < new[:, None]))
        self._of_chunk = (places - before).clamp(0, step.chunk_tokens - 1)
        self._windows = step.windows
        self._since = past.clamp(min=0)[:, None] - places  # [slots, tokens]
        self._since_by_chunk = in_chunk[:, None] - places  # [chunk, tokens]
        self._biases = self._chunk_biases = None
        if step.by_distance is not None:
            max_distance = len(step.by_distance) - 1
            by_place = [
                embedding((at[:, None] - places).clamp(0, max_distance), step.by_distance).permute(0, 2, 1)
                for at in (past, in_chunk)
            ]  # [slots or chunk, heads, tokens]
            self._biases, self._chunk_biases = by_place[0][:, :, None], by_place[1].transpose(0, 1)[:, None]
        self.added: list[torch.Tensor] = []
        self.seen_sources = 0
        if read is not None:
            self._read_slots = read[:, 0]
            self._seen_of_source = (places[None] < read[:, 1:])[:, None, None]  # [slots + 1, 1, 1, tokens]

    def write(self, new: torch.Tensor) -> torch.Tensor:
        """Returns the next state with the keys or values of the new tokens, [1, heads, slots + chunk, width]."""
        old = self._texts[len(self.added)].index_select(0, self._copied)
        singles = new[0, :, : self.slots].transpose(0, 1)[:, :, None]
        chunk = new[:, :, self.slots :].index_select(2, self._of_chunk)
        added = torch.where(self._gets_chunk[:, None, None, None], chunk, singles)
        # Zeros follow. An earlier text may have left NaN there, which the zero weight of masked places does not mend.
        after = torch.where(self._is_kept, old, torch.where(self._is_new, added, 0.0).to(old.dtype))
        self.added.append(after)
        return after

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Computes the attention of each new token to its text: [1, slots + chunk, heads, width].

        `query`: [1, heads, slots + chunk, width]. Heads of queries share the heads of keys.
        """
        own_keys, own_values = (states.index_select(0, self._slot) for states in (keys, values))
        window = self._windows[len(self.added) // 2 - 1]
        seen, seen_by_chunk = (
            (since >= 0) & (since < window) if window else since >= 0 for since in (self._since, self._since_by_chunk)
        )
        of_slots = _Seen(keys, values, seen[:, None, None], self._biases)
        of_chunk = _Seen(own_keys, own_values, seen_by_chunk, self._chunk_biases)
        return self._attended(query, of_slots, of_chunk, scaling, softcap)

    def attend_to_source(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Computes the attention of each new token to its source, as in `attend`."""
        keys, values = (
            torch.cat([states_of_slot[index] for states_of_slot in self._sources]).index_select(0, self._read_slots)
            for index in (self.seen_sources, self.seen_sources + 1)
        )
        self.seen_sources += 2
        of_slots = _Seen(keys[:-1], values[:-1], self._seen_of_source[:-1])
        of_chunk = _Seen(keys[-1:], values[-1:], self._seen_of_source[-1])
        return self._attended(query, of_slots, of_chunk, scaling, None)

    def _attended(
        self, query: torch.Tensor, of_slots: "_Seen", of_chunk: "_Seen", scaling: float, softcap: float | None
    ) -> torch.Tensor:
        def weigh(of: torch.Tensor, seen: _Seen) -> torch.Tensor:
            scores = (of @ seen.keys.transpose(-1, -2)).float() * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if seen.biases is not None:
                scores = scores + seen.biases
            weights = torch.where(seen.mask, scores, torch.finfo(scores.dtype).min).softmax(-1)
            return weights.to(seen.values.dtype) @ seen.values

        grouped = query[0].unflatten(0, (of_slots.keys.shape[1], -1))  # [groups, heads of a group, new, width]
        singles = grouped[:, :, : self.slots].permute(2, 0, 1, 3)
        single = weigh(singles, of_slots).flatten(1, 2)
        seen_chunk = _Seen(of_chunk.keys[0][:, None], of_chunk.values[0][:, None], of_chunk.mask, of_chunk.biases)
        chunk = weigh(grouped[:, :, self.slots :], seen_chunk).flatten(0, 1)
        return torch.cat([single, chunk.transpose(0, 1)])[None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Keys and values, [rows, groups, tokens, width], the mask of the tokens that are seen, and biases of scores."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    biases: torch.Tensor | None = None


_running: ContextVar[_RunningStep] = ContextVar("running")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention by the running step; see transformers.AttentionInterface."""
    step = _running.get()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if key.shape[2] != query.shape[2]:  # cross-attention, whose keys come from the encoder
        return step.attend_to_source(query, scaling), None
    return step.attend(query, step.write(key), step.write(value), scaling, softcap), None


AttentionInterface.register(_ATTENTION, _attention)
