"""Wraps a module for tracing: inputs and outputs by position."""

from collections.abc import Sequence

import torch


class Positional(torch.nn.Module):
    """A module that takes its inputs in a fixed order, passes them on by name, and returns a tuple of outputs.

    A trace is called by position. BERT's tokenizer puts token_type_ids before attention_mask, and BERT's forward the
    other way round.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(**dict(zip(self._inputs, tensors, strict=True)))
        return tuple(result[name] for name in self._outputs)
