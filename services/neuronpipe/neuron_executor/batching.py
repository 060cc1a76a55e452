"""Sequences to one padded batch, and the batch's outputs back to sequences."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.core.errors import InternalError, InvalidInput, NeuronpipeError
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays


def check_sequence(arrays: Arrays, spec: ModelSpec) -> None:
    """Refuses what could harm the batch: a wrong shape or dtype, more tokens than the model takes, ids outside of its vocabulary."""
    if spec.image:
        _check_pixels(arrays, spec, spec.image.size)
    else:
        _check_tokens(arrays, spec)


def _check_pixels(arrays: Arrays, spec: ModelSpec, size: tuple[int, int]) -> None:
    (name,), expected = spec.inputs, (3, *size)
    if set(arrays) != {name}:
        raise InvalidInput("inputs", f"{len(arrays)} arrays, expected one named {name}")
    array = arrays[name]
    if array.dtype != np.uint8 or array.shape != expected:
        raise InvalidInput(name, f"{array.dtype}{list(array.shape)}, expected uint8{list(expected)}")


def _check_tokens(arrays: Arrays, spec: ModelSpec) -> None:
    token_ids = arrays.get("input_ids")
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
        raise InvalidInput("input_ids", f"ids from {token_ids.min()} to {token_ids.max()}, the vocabulary has {spec.vocabulary_size}")


def shortest_sequence(spec: ModelSpec) -> Arrays:
    """The least that a model takes, to warm it up: a token, or a black image."""
    if spec.image:
        return {name: np.zeros((3, *spec.image.size), np.uint8) for name in spec.inputs}
    return {"input_ids": np.full(1, spec.pad_token_id, np.int32)}


def pad(sequences: Sequence[Arrays], padded_tokens: int, spec: ModelSpec) -> dict[str, Array]:
    """The model's inputs, in its order, int64 [batch, padded_tokens]: padded on the right, with the mask made from the lengths.

    Of images uint8 [batch, 3, height, width]: all have the same size, and none is padded.
    """
    if spec.image:
        return {name: np.stack([arrays[name] for arrays in sequences]) for name in spec.inputs}
    shape = (len(sequences), padded_tokens)
    batch: dict[str, Array] = {}
    for name in spec.inputs:
        array = np.full(shape, spec.pad_token_id if name == "input_ids" else 0, np.int64)
        for row, arrays in enumerate(sequences):
            tokens = len(arrays["input_ids"])
            if name == "attention_mask":
                array[row, :tokens] = 1
            elif name in arrays:
                array[row, :tokens] = arrays[name]
        batch[name] = array
    return batch


def cut(outputs: Arrays, row: int, tokens: int, spec: ModelSpec) -> dict[str, Array]:
    """One sequence's outputs without padding, copied so that they do not keep the batch alive."""
    arrays = {}
    for output in spec.outputs:
        without_padding = tuple(slice(tokens) if axis == "tokens" else slice(None) for axis in output.axes)
        arrays[output.name] = outputs[output.name][(row, *without_padding)].copy()
    return arrays


def fault_of(arrays: Arrays) -> NeuronpipeError | None:
    """The error of a sequence with outputs that are NaN or infinite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            return InternalError(f"the model's output {name!r} is not finite for this input")
    return None
