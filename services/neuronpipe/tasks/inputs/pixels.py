"""Images as pixels: uint8 [3, height, width] each, all of one size, uint8 [batch, 3, height, width] together."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ImageSpec
from neuronpipe.core.tensors import Array, Arrays

# All images have one length, so the warm-up's batches differ in rows.
_WARM_UP_ROWS = (1, 2)


class Pixels:
    """See InputKind. `name`: of the model's only input."""

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
        """See InputKind: the same for every image."""
        return self._tokens

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """See InputKind: as they are, uint8 [batch, 3, height, width]."""
        return {self._name: np.stack([arrays[self._name] for arrays in sequences])}

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        return len(batch[self._name]), self._tokens

    def shortest(self) -> Arrays:
        """See InputKind: a black image."""
        return {self._name: np.zeros(self._shape, np.uint8)}

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        return [(rows, self._tokens) for rows in _WARM_UP_ROWS]
