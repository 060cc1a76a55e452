"""Positions of image models for images of one size, computed once.

DINOv2 interpolates the positions that it learned to the size of each image. While a model is traced it always does, and
not every back end interpolates with the same rounding.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_METHOD, _BUFFER = "interpolate_pos_encoding", "fixed_positions"


def _positions(part: Any, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
    positions: torch.Tensor = part.fixed_positions
    return positions


@contextmanager
def fixing_positions(model: torch.nn.Module) -> Iterator[None]:
    """From then on each part of the model has the positions that it computes within the context."""
    parts: list[Any] = [part for part in model.modules() if callable(getattr(part, _METHOD, None))]
    computed: dict[Any, torch.Tensor] = {}

    def record(part: Any) -> None:
        original = getattr(part, _METHOD)

        def recorded(*args: Any, **options: Any) -> torch.Tensor:
            computed[part] = positions = original(*args, **options)
            return positions

        setattr(part, _METHOD, recorded)

    for part in parts:
        record(part)
    try:
        yield
    finally:
        for part in parts:
            delattr(part, _METHOD)
    for part, positions in computed.items():
        part.register_buffer(_BUFFER, positions.clone(), persistent=False)
        # A method, whose copy belongs to the copy of the part.
        setattr(part, _METHOD, types.MethodType(_positions, part))
