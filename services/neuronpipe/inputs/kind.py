"""What a kind of input knows of itself, so that batching need not ask which kind it is."""

from collections.abc import Sequence
from typing import Protocol

from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.inputs.pixels import Pixels
from neuronpipe.inputs.tokens import Tokens


class InputKind(Protocol):
    """One model's inputs. A sequence is one row: arrays by name, as they came over the wire."""

    def check(self, arrays: Arrays) -> None:
        """Raises InvalidInput for a sequence that could harm its batch: a wrong name, shape or dtype."""

    def tokens_of(self, arrays: Arrays) -> int:
        """How many tokens a sequence has, or counts as."""

    def pad(self, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        """The sequences as one batch: the model's inputs in its order."""

    def shape_of(self, batch: Arrays) -> tuple[int, int]:
        """Rows and padded tokens of a batch."""

    def shortest(self) -> Arrays:
        """The least that a model takes."""

    def warm_up_shapes(self) -> Sequence[tuple[int, int]]:
        """Rows and tokens of two batches whose times tell what a batch costs from what a token costs."""


def input_kind(spec: ModelSpec) -> InputKind:
    """The kind of a model's inputs."""
    return Pixels(spec.inputs[0], spec.image) if spec.image else Tokens(spec)
