"""Texts and images for one model, in common batches: each sequence is one or the other."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.core.model import ImageSpec, ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks.inputs.pixels import Pixels
from neuronpipe.tasks.inputs.tokens import Tokens

_PIXELS, _PLACES = "pixels", "places"


class TokensAndPixels:
    """See InputKind. A batch has the texts, then the images, either of which may be none, and `places`: int64 [batch],
    where each sequence is among them. The graph puts its outputs into that order.
    """

    def __init__(self, spec: ModelSpec, image: ImageSpec) -> None:
        text_inputs = tuple(name for name in spec.inputs if name not in (_PIXELS, _PLACES))
        self._tokens = Tokens(spec.model_copy(update={"inputs": text_inputs}))
        self._pixels = Pixels(_PIXELS, image)
        self._no_pixels = np.zeros((0, 3, *image.size), np.uint8)
        self._image_tokens = spec.image_tokens

    def check(self, arrays: Arrays) -> None:
        """See InputKind."""
        (self._pixels if _PIXELS in arrays else self._tokens).check(arrays)

    def tokens_of(self, arrays: Arrays) -> int:
        """See InputKind."""
        return self._image_tokens if _PIXELS in arrays else self._tokens.tokens_of(arrays)

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """See InputKind."""
        is_image = np.array([_PIXELS in arrays for arrays in sequences])
        images = [arrays for arrays in sequences if _PIXELS in arrays]
        texts = [arrays for arrays in sequences if _PIXELS not in arrays]
        pixels = self._pixels.pad(images, padded_tokens) if images else {_PIXELS: self._no_pixels}
        places = np.where(is_image, len(texts) + np.cumsum(is_image), np.cumsum(~is_image)) - 1
        return self._tokens.pad(texts, padded_tokens) | pixels | {_PLACES: places}

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        """See InputKind."""
        return len(batch[_PLACES]), batch["input_ids"].shape[1]

    def shortest(self) -> Arrays:
        """See InputKind: a text of one token."""
        return self._tokens.shortest()

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        """See InputKind: of texts."""
        return self._tokens.warm_up_shapes()
