"""Sequences of tokens: int32 [tokens] each, padded on the right to int64 [batch, tokens]."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays

# Lengths of the warm-up's batches: far apart, to separate the overhead of a batch from the cost of a token, and still
# fast.
_WARM_UP_TOKENS = (3, 64)


class Tokens:
    """See InputKind."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def check(self, arrays: Arrays) -> None:
        """See InputKind. Refuses ids outside of the vocabulary and more tokens than the model takes, too."""
        spec, token_ids = self._spec, arrays.get("input_ids")
        if token_ids is None:
            raise InvalidInput("input_ids", "missing")
        for name, array in arrays.items():
            if name not in spec.inputs:
                raise InvalidInput(name, f"the model has no such input, only {', '.join(spec.inputs)}")
            if array.dtype != np.int32 or array.ndim != 1 or array.shape != token_ids.shape:
                raise InvalidInput(name, f"{array.dtype}{list(array.shape)}, expected int32{list(token_ids.shape[:1])}")
        if not 1 <= len(token_ids) <= spec.max_tokens:
            raise InvalidInput("input_ids", f"{len(token_ids)} tokens, the model takes 1 to {spec.token_limit}")
        if token_ids.view(np.uint32).max() >= spec.vocabulary_size:  # as unsigned, negative ids are large ones
            raise InvalidInput(
                "input_ids",
                f"ids from {token_ids.min()} to {token_ids.max()}, the vocabulary has {spec.vocabulary_size}",
            )

    def tokens_of(self, arrays: Arrays) -> int:
        return len(arrays["input_ids"])

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """See InputKind: int64 [batch, padded_tokens], with the mask made from the lengths."""
        shape = (len(sequences), padded_tokens)
        batch: dict[str, Array] = {}
        for name in self._spec.inputs:
            array = np.full(shape, self._spec.pad_token_id if name == "input_ids" else 0, np.int64)
            for row, arrays in enumerate(sequences):
                tokens = len(arrays["input_ids"])
                if name == "attention_mask":
                    array[row, :tokens] = 1
                elif name in arrays:
                    array[row, :tokens] = arrays[name]
            batch[name] = array
        return batch

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        rows, tokens = batch["input_ids"].shape
        return rows, tokens

    def shortest(self) -> Arrays:
        """See InputKind: one token."""
        return {"input_ids": np.full(1, self._spec.pad_token_id, np.int32)}

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        return [(1, min(tokens, self._spec.max_tokens)) for tokens in _WARM_UP_TOKENS]
