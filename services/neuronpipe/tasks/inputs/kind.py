"""The contract of a kind of input, with which batching is the same for tokens and pixels, and the three kinds."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ADAPTER, ImageSpec, ModelSpec
from neuronpipe.core.tensors import Array, Arrays

# Lengths of the warm-up's batches: fast, and different enough to separate a batch's overhead from a token's cost.
_WARM_UP_TOKENS = (3, 64)
# All images have one length, so the warm-up's batches of images differ in rows.
_WARM_UP_ROWS = (1, 2)
_PIXELS, _PLACES = "pixels", "places"


class InputKind(Protocol):
    """The inputs of one model. A sequence is one row: arrays by name, as they arrived."""

    def check(self, arrays: Arrays) -> None:
        """Raises InvalidInput if a sequence could harm its batch: a wrong name, shape or dtype."""

    def tokens_of(self, arrays: Arrays) -> int:
        """Returns the number of tokens of a sequence, or the number that it counts as."""

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """Pads the sequences to one batch: the model's inputs in its order."""

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        """Returns the rows and padded tokens of a batch."""

    def shortest(self, padded_tokens: int = 1) -> Arrays:
        """Returns the shortest sequence that a batch of a padded length may contain."""

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        """Returns rows and tokens of two batches, whose times give the overhead of a batch and the cost of a token."""


def adapted(arrays: Arrays, number: int) -> Arrays:
    """Adds the number of an adapter to a sequence of tokens; 0: the base without an adapter."""
    token_ids = arrays.get("input_ids")
    return arrays if token_ids is None else {**arrays, ADAPTER: np.full(token_ids.shape, number, np.int32)}


def input_kind(spec: ModelSpec) -> InputKind:
    if spec.image is None:
        return Tokens(spec)
    return TokensAndPixels(spec, spec.image) if spec.takes_texts else Pixels(spec.inputs[0], spec.image)


class Tokens:
    """Sequences of tokens: int32 [tokens] each, padded on the right to int64 [batch, tokens]."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def check(self, arrays: Arrays) -> None:
        """See InputKind. Also refuses ids outside the vocabulary, and more tokens than the model's limit."""
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
        unsigned = token_ids.view(np.uint32)  # as unsigned numbers, negative ids are large
        if unsigned[unsigned.argmax()] >= spec.vocabulary_size:  # argmax takes a third of the time of max
            problem = f"ids from {token_ids.min()} to {token_ids.max()}, the vocabulary has {spec.vocabulary_size}"
            raise InvalidInput("input_ids", problem)

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

    def shortest(self, padded_tokens: int = 1) -> Arrays:
        return {"input_ids": np.full(1, self._spec.pad_token_id, np.int32)}

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        return [(1, min(tokens, self._spec.max_tokens)) for tokens in _WARM_UP_TOKENS]


class Pixels:
    """Images: uint8 [3, height, width] each, all of one size; `name`: the model's only input."""

    def __init__(self, name: str, image: ImageSpec) -> None:
        self._name = name
        self._shape = (3, *image.size)
        self._tokens = image.tokens

    def check(self, arrays: Arrays) -> None:
        if set(arrays) != {self._name}:
            raise InvalidInput("inputs", f"{len(arrays)} arrays, expected one named {self._name}")
        array = arrays[self._name]
        if array.dtype != np.uint8 or array.shape != self._shape:
            raise InvalidInput(self._name, f"{array.dtype}{list(array.shape)}, expected uint8{list(self._shape)}")

    def tokens_of(self, arrays: Arrays) -> int:
        return self._tokens

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """See InputKind: the images as they are, uint8 [batch, 3, height, width]."""
        return {self._name: np.stack([arrays[self._name] for arrays in sequences])}

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        return len(batch[self._name]), self._tokens

    def shortest(self, padded_tokens: int = 1) -> Arrays:
        return {self._name: np.zeros(self._shape, np.uint8)}

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        return [(rows, self._tokens) for rows in _WARM_UP_ROWS]


class TokensAndPixels:
    """Texts and images for one model: each sequence is a text or an image.

    A batch has the texts (or none), then the images (or none), and `places`: int64 [batch], the place of each sequence
    among these rows. The graph puts its outputs into that order. The executor's batches are all texts or all images,
    because an image counts as longer than any text.
    """

    def __init__(self, spec: ModelSpec, image: ImageSpec) -> None:
        text_inputs = tuple(name for name in spec.inputs if name not in (_PIXELS, _PLACES))
        self._tokens = Tokens(spec.model_copy(update={"inputs": text_inputs}))
        self._pixels = Pixels(_PIXELS, image)
        self._no_pixels = np.zeros((0, 3, *image.size), np.uint8)
        self._max_tokens, self._image_length = spec.max_tokens, spec.image_length

    def check(self, arrays: Arrays) -> None:
        (self._pixels if _PIXELS in arrays else self._tokens).check(arrays)

    def tokens_of(self, arrays: Arrays) -> int:
        return self._image_length if _PIXELS in arrays else self._tokens.tokens_of(arrays)

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        is_image = np.array([_PIXELS in arrays for arrays in sequences])
        images = [arrays for arrays in sequences if _PIXELS in arrays]
        texts = [arrays for arrays in sequences if _PIXELS not in arrays]
        pixels = self._pixels.pad(images, padded_tokens) if images else {_PIXELS: self._no_pixels}
        places = np.where(is_image, len(texts) + np.cumsum(is_image), np.cumsum(~is_image)) - 1
        return self._tokens.pad(texts, min(padded_tokens, self._max_tokens)) | pixels | {_PLACES: places}

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        return len(batch[_PLACES]), batch["input_ids"].shape[1]

    def shortest(self, padded_tokens: int = 1) -> Arrays:
        """See InputKind: a text of one token, or an image."""
        return (self._pixels if padded_tokens > self._max_tokens else self._tokens).shortest()

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        return self._tokens.warm_up_shapes()
