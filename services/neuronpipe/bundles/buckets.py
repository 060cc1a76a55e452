"""Buckets: the shapes, batch x tokens, for which a model is compiled if its back end computes no other shapes."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import Frozen, ImageSpec
from neuronpipe.core.tensors import Array, Arrays

_BUCKET = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")


class Bucket(Frozen):
    """A shape for which a model is compiled, written "8x128"."""

    batch: int = Field(ge=1, description="rows")
    tokens: int = Field(ge=1, description="columns")

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def padded_tokens(self) -> int:
        """The number of tokens that the device computes, including padding and unused rows."""
        return self.batch * self.tokens

    def holds(self, rows: int, tokens: int) -> bool:
        return rows <= self.batch and tokens <= self.tokens


def parse_bucket(text: str) -> Bucket:
    """Parses a bucket such as "8x128". Raises SetupError."""
    match = _BUCKET.fullmatch(text)
    if match is None:
        raise SetupError(f"--bucket {text!r}: must be BATCHxTOKENS, both whole numbers from 1 on, as in 8x128")
    return Bucket(batch=int(match[1]), tokens=int(match[2]))


class BucketPlan:
    """The buckets of one model: the shapes that are compiled, warmed up and filled with batches."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets = tuple(sorted(set(buckets), key=lambda bucket: (bucket.tokens, bucket.batch)))
        self._lengths = sorted({bucket.tokens for bucket in self.buckets})
        self._batches = {
            length: tuple(bucket.batch for bucket in self.buckets if bucket.tokens == length)
            for length in self._lengths
        }  # ascending

    @property
    def largest(self) -> Bucket:
        """The longest bucket, with the fewest rows of that length. Its length limits the tokens of a sequence."""
        return next(bucket for bucket in self.buckets if bucket.tokens == self._lengths[-1])

    def round_tokens(self, tokens: int) -> int:
        """Returns the shortest bucket length that holds a number of tokens, or the longest length if none does."""
        return next((length for length in self._lengths if length >= tokens), self._lengths[-1])

    def batches(self, tokens: int) -> tuple[int, ...]:
        return self._batches[tokens]

    def find(self, rows: int, tokens: int) -> Bucket | None:
        """Returns the bucket that computes the fewest tokens for a batch; None if no bucket holds it."""
        fitting = [bucket for bucket in self.buckets if bucket.holds(rows, tokens)]
        return min(fitting, key=lambda bucket: (bucket.padded_tokens, bucket.tokens), default=None)


def bucket_inputs(names: Sequence[str], bucket: Bucket, image: ImageSpec | None) -> dict[str, tuple[list[int], str]]:
    """Returns shape and dtype of each input of a bucket's trace: int64, as in optimum-neuron, or pixels in float32."""
    if image is not None:
        return {name: ([bucket.batch, 3, *image.size], "float32") for name in names}
    return {name: ([bucket.batch, bucket.tokens], "int64") for name in names}


def fill_bucket(inputs: Arrays, bucket: Bucket, pad_token_id: int) -> dict[str, Array]:
    """Pads a batch to its bucket.

    Rows are padded on the right with the tokenizer's padding id. Unused rows are copies of the first sequence: no row's
    mask is all zero, because a softmax over masked tokens only is NaN on some devices. The padding id matters, because
    RoBERTa's positions depend on it. Pixels, uint8 [batch, 3, height, width], become float32.
    """
    filled = {}
    for name, array in inputs.items():
        rows, width = array.shape[:2]
        shape, dtype = ((bucket.tokens,), array.dtype) if array.ndim == 2 else (array.shape[1:], np.dtype(np.float32))
        whole: np.ndarray[Any, Any] = np.full((bucket.batch, *shape), pad_token_id if name == "input_ids" else 0, dtype)
        whole[:rows, :width] = array
        whole[rows:] = whole[0]
        filled[name] = whole
    return filled


def cut_bucket(outputs: Arrays, rows: int) -> dict[str, Array]:
    """Removes the unused rows of a bucket's outputs. Padded tokens are removed later, with each sequence."""
    return {name: array[:rows] for name, array in outputs.items()}
