"""The menu of shapes of a back end that computes any shape.

A runtime keeps code and buffers for each shape that it computes. OpenVINO's int8 kernels need 5 MB for each number of
tokens of a batch (MiniLM, 38 matrix products, CPU with AMX; docs/benchmarks/README.md), and the first batch of a
shape takes ten times as long. So batches have a bounded number of shapes, which are all computed soon after the start.
"""

from bisect import bisect_left
from dataclasses import dataclass

from neuronpipe.core.model import ModelSpec

# Sequence lengths and batch sizes in tokens are on one grid: multiples of 8 up to 64, then steps of an eighth of the
# next power of two. Multiples of 16 up to 128 need as many kernels, because the numbers of tokens are
# nearly equal. But 32 callers with texts of 33 tokens on average then get 2 to 8 % less throughput: padding is 18 % of
# all tokens instead of 11 % (simulated 2026-11-29, for batches whose overhead equals 10 to 50 tokens).
_STEPS = 8
_LEAST_STEP = 8


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a batch on a core, or on the whole device for a batch that runs alone."""

    core: int
    rows: int
    tokens: int
    is_alone: bool


class ShapeMenu:
    """The shapes of batches: lengths up to the model's limit, and numbers of rows for which the tokens are on the grid.

    Matrix products depend only on the number of tokens of the whole batch, so a few such numbers need few kernels.
    """

    def __init__(self, spec: ModelSpec, max_batch_tokens: int) -> None:
        """`max_batch_tokens`: limit of a batch of several sequences. Larger batches are not faster on this device."""
        # All images have one length.
        self._image_length = spec.image_length
        images = [spec.image_length] if spec.image else []
        self.lengths = [*_grid(spec.max_tokens), *images] if spec.takes_texts else images
        token_counts = frozenset(_grid(max_batch_tokens))
        row_counts = frozenset(_grid(max_batch_tokens, 1))
        # If no multiple of a length is on the grid, as with images, the number of rows must be on it.
        self._row_counts = {
            length: [
                rows
                for rows in range(1, max(1, max_batch_tokens // length) + 1)
                if rows == 1 or (rows * length in token_counts if length % _LEAST_STEP == 0 else rows in row_counts)
            ]
            for length in self.lengths
        }

    @property
    def batch_tokens(self) -> set[int]:
        """The numbers of tokens that a batch may have."""
        return {rows * tokens for tokens, row_counts in self._row_counts.items() for rows in row_counts}

    def round_tokens(self, tokens: int) -> int:
        """Returns the length to which a sequence is padded."""
        return self.lengths[min(bisect_left(self.lengths, tokens), len(self.lengths) - 1)]

    def can_share_batch(self, tokens: int, other_tokens: int) -> bool:
        """Returns whether sequences of two lengths may share a batch. Images and texts may not."""
        return (tokens == self._image_length) == (other_tokens == self._image_length)

    def most_rows(self, tokens: int) -> int:
        """Returns the largest number of rows in a batch of sequences of a length."""
        return self._row_counts[tokens][-1]

    def rows_within(self, rows: int, tokens: int) -> int:
        """Returns the largest number of rows on the menu that is at most `rows`, for sequences of a length."""
        return next(count for count in reversed(self._row_counts[tokens]) if count <= rows)

    def rows_for(self, rows: int, tokens: int) -> int:
        """Returns the smallest number of rows on the menu that is at least `rows`, or `rows` itself."""
        return next((count for count in self._row_counts[tokens] if count >= rows), rows)

    def planned(self, cores: int, max_rows: int, max_batch_tokens: int) -> list[BatchShape]:
        """Lists each shape within the limits on each core, the most likely shapes (few tokens) first."""
        lone = [BatchShape(0, 1, tokens, is_alone=True) for tokens in self.lengths]
        batches = [
            BatchShape(core, rows, tokens, is_alone=False)
            for tokens, row_counts in self._row_counts.items()
            for rows in row_counts
            if rows == 1 or (rows <= max_rows and rows * tokens <= max_batch_tokens)
            for core in range(cores)
        ]
        return sorted(lone + batches, key=lambda shape: (shape.rows * shape.tokens, not shape.is_alone))


def _grid(limit: int, least_step: int = _LEAST_STEP) -> list[int]:
    """Lists the grid of numbers up to a limit, with the limit as its last number."""
    numbers, number = [], least_step
    while number < limit:
        numbers.append(number)
        number += max(least_step, (1 << number.bit_length()) // _STEPS)
    return [*numbers, limit]
