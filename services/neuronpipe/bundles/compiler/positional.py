"""A module as a trace needs it: inputs and outputs by position."""

from collections.abc import Sequence

import torch

# Of the tensors that a trace takes, and of what the executor sends: a trace takes no other. optimum-neuron's choice, too.
INPUT_DTYPE = "int64"


class Positional(torch.nn.Module):
    """A module that takes its inputs in a fixed order and hands them on by name, and gives a tuple of its outputs in a fixed order.

    A trace is called by position: BERT's tokenizer puts token_type_ids before attention_mask, BERT's forward the other way round.
    """

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(**dict(zip(self._inputs, tensors, strict=True)))
        return tuple(result[name] for name in self._outputs)
