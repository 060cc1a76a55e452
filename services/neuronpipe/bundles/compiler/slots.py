"""The step of a decoder as one graph of fixed shapes that keeps its cache in slots (runtimes/slots.py).

All new tokens, one of each slot and a part of one prompt, go through the layers as one row, so that the weights are
read once. Attention is where they part: each token of a slot sees that slot, those of the prompt see theirs.
"""

import copy
import dataclasses
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.compiler.modules import SourceModule, pretrained_model
from neuronpipe.bundles.compiler.stateful import shapes_of
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.decoder import TOP_TOKENS, Scores
from neuronpipe.runtimes.slots import CHUNK_TOKENS, SlotModel

_ATTENTION = "neuronpipe-slots"


class SlotStep(torch.nn.Module):
    """A decoder as a function of new tokens, and of what is in its slots, `states`: keys and values in turns.

    Inputs: see SlotGraph. Outputs: logits, [slots + 1, vocabulary], the best tokens and their logits, [slots + 1,
    tops], and what is in the slots from then on, as `states`.
    """

    def __init__(self, model: Any, slots: int, slot_tokens: int, chunk_tokens: int) -> None:
        """Raises SetupError for a model whose attention is not a function of its own."""
        super().__init__()
        self.model = model
        self.slots, self.slot_tokens, self.chunk_tokens = slots, slot_tokens, chunk_tokens
        cache = DynamicCache()
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 0]]), past_key_values=cache, use_cache=True)
        sizes = [(heads, width) for heads, *widths in shapes_of(cache) for width in widths]
        self.states = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(slots, heads, slot_tokens, width), requires_grad=False)
            for heads, width in sizes
        )
        model.set_attn_implementation(_ATTENTION)

    def example(self) -> tuple[torch.Tensor, ...]:
        """Inputs to trace it with."""
        return (
            torch.zeros(1, self.slots + self.chunk_tokens, dtype=torch.int64),
            torch.zeros(self.slots, dtype=torch.int64),
            torch.tensor([0, 0, 1]),
            torch.arange(self.slots),
        )

    def aliases(self) -> dict[torch.Tensor, int]:
        """Which output each state becomes."""
        return {state: 3 + number for number, state in enumerate(self.states)}

    def forward(
        self, token_ids: torch.Tensor, past: torch.Tensor, chunk: torch.Tensor, sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        step = _Step(self, past, chunk, sources)

        def choose(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (args[0].index_select(1, step.scored),)

        handle = self.model.get_output_embeddings().register_forward_pre_hook(choose)
        running = _running.set(step)
        try:
            result = self.model(input_ids=token_ids, position_ids=step.positions, use_cache=False, return_dict=True)
        finally:
            _running.reset(running)
            handle.remove()
        if len(step.added) != len(self.states):
            raise SetupError(
                f"{type(self.model).__name__} has attention of its own, and cannot be compiled for slots of fixed "
                "shapes"
            )
        logits = result["logits"][0].float()
        top_logits, top_ids = logits.topk(min(TOP_TOKENS, logits.shape[1]))
        return logits, top_ids.int(), top_logits, *step.added


def slot_step(module: SourceModule, bucket: Bucket) -> SlotStep:
    """The step of a model for a bucket: as many slots as it has rows, each of as many tokens as it has columns."""
    step = SlotStep(pretrained_model(module.module), bucket.batch, bucket.tokens, CHUNK_TOKENS)
    step.eval()
    return step


def emulated(module: SourceModule, bucket: Bucket, dtype: str) -> SlotModel:
    """The model as it will run, computed by PyTorch."""
    copied = dataclasses.replace(module, module=copy.deepcopy(module.module))  # it gets another attention
    return SlotModel(_PyTorchGraph(slot_step(copied, bucket), dtype), bucket.batch, bucket.tokens, CHUNK_TOKENS)


class _PyTorchGraph:
    """See SlotGraph."""

    def __init__(self, step: SlotStep, dtype: str) -> None:
        self._step = step
        self._cast = dtype == "bfloat16"

    def execute(
        self,
        token_ids: NDArray[np.int64],
        past: NDArray[np.int64],
        chunk: NDArray[np.int64],
        sources: NDArray[np.int64],
    ) -> Scores:
        """See SlotGraph."""
        given = (torch.from_numpy(array) for array in (token_ids, past, chunk, sources))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._cast):
            logits, top_ids, top_logits, *states = self._step(*given)
            for state, new in zip(self._step.states, states, strict=True):
                state.copy_(new)
        return Scores(logits.numpy(), top_ids.numpy(), top_logits.numpy())


class _Step:
    """Where the tokens of one step are, and what is in the slots after it: `added`."""

    def __init__(self, of: SlotStep, past: torch.Tensor, chunk: torch.Tensor, sources: torch.Tensor) -> None:
        slot, before, count = (chunk[index : index + 1] for index in range(3))
        places = torch.arange(of.slot_tokens)
        self.slots, self._states, self._slot, self._sources = of.slots, of.states, slot, sources
        in_chunk = before + torch.arange(of.chunk_tokens)
        # Unused tokens have positions, too, which have to be some that the model knows.
        self.positions = torch.cat([past, in_chunk])[None].clamp(0, of.slot_tokens - 1)
        self.scored = torch.cat([torch.arange(of.slots), of.slots + (count - 1).clamp(min=0)])
        self._gets_chunk = (torch.arange(of.slots) == slot) & (count > 0)
        kept = torch.where(self._gets_chunk, before, torch.where(past < 0, of.slot_tokens, past))
        new = torch.where(self._gets_chunk, count, (past >= 0).long())
        behind = places[None] - kept[:, None]  # [slots, tokens]
        self._is_kept, self._is_new = ((one[:, None, :, None]) for one in (behind < 0, behind < new[:, None]))
        self._of_chunk = (places - before).clamp(0, of.chunk_tokens - 1)
        self._seen = (places[None] <= past.clamp(min=0)[:, None])[:, None, None]  # [slots, 1, 1, tokens]
        self._seen_by_chunk = places[None] <= in_chunk[:, None]  # [chunk, tokens]
        self.added: list[torch.Tensor] = []

    def write(self, new: torch.Tensor) -> torch.Tensor:
        """The next state with the keys or values of the new tokens, [1, heads, slots + chunk, width]."""
        old = self._states[len(self.added)].index_select(0, self._sources)
        singles = new[0, :, : self.slots].transpose(0, 1)[:, :, None]
        chunk = new[:, :, self.slots :].index_select(2, self._of_chunk)
        added = torch.where(self._gets_chunk[:, None, None, None], chunk, singles)
        # Zeros behind: what is masked has a weight of zero, which does not help against the NaN of a text before.
        after = torch.where(self._is_kept, old, torch.where(self._is_new, added, 0.0).to(old.dtype))
        self.added.append(after)
        return after

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """What each new token sees: [1, slots + chunk, heads, width]. `query`: [1, heads, slots + chunk, width].

        Heads of queries share those of keys.
        """

        def weigh(of: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            scores = (of @ keys.transpose(-1, -2)).float() * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            weights = torch.where(seen, scores, torch.finfo(scores.dtype).min).softmax(-1)
            return weights.to(values.dtype) @ values

        groups = keys.shape[1]
        grouped = query[0].unflatten(0, (groups, -1))  # [groups, heads of a group, new, width]
        singles = grouped[:, :, : self.slots].permute(2, 0, 1, 3)
        of_slots = weigh(singles, keys, values, self._seen).flatten(1, 2)
        own_keys, own_values = (one.index_select(0, self._slot)[0][:, None] for one in (keys, values))
        of_chunk = weigh(grouped[:, :, self.slots :], own_keys, own_values, self._seen_by_chunk).flatten(0, 1)
        return torch.cat([of_slots, of_chunk.transpose(0, 1)])[None]


_running: ContextVar[_Step] = ContextVar("running")


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
    """See transformers.AttentionInterface."""
    step = _running.get()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return step.attend(query, step.write(key), step.write(value), scaling, softcap), None


AttentionInterface.register(_ATTENTION, _attention)
