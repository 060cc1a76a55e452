"""The contract of a kind of input, so that batching is the same for tokens and pixels."""

from collections.abc import Sequence
from typing import Protocol

from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks.inputs.pixels import Pixels
from neuronpipe.tasks.inputs.tokens import Tokens
from neuronpipe.tasks.inputs.tokens_and_pixels import TokensAndPixels


class InputKind(Protocol):
    """The inputs of one model. A sequence is one row: arrays by name, as received."""

    def check(self, arrays: Arrays) -> None:
        """Raises InvalidInput for a sequence that could harm its batch: a wrong name, shape or dtype."""

    def tokens_of(self, arrays: Arrays) -> int:
        """The number of tokens that a sequence has, or counts as."""

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """The sequences as one batch: the model's inputs in its order."""

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        """The rows and padded tokens of a batch."""

    def shortest(self) -> Arrays:
        """The shortest sequence that a model takes."""

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        """Rows and tokens of two batches. From their times follow the overhead of a batch and the cost of a token."""


def input_kind(spec: ModelSpec) -> InputKind:
    """The kind of a model's inputs."""
    if spec.image is None:
        return Tokens(spec)
    return TokensAndPixels(spec, spec.image) if spec.takes_texts else Pixels(spec.inputs[0], spec.image)
