"""The contract of a loaded decoder with a key-value cache in blocks: tokens of any sequences in, scores out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence in a step. `past`: its tokens that are in `blocks` already.

    `blocks` has room for both, in order. `is_scored`: whether the scores after the last of these tokens are needed.
    `source_tokens` and `source_blocks`: of a model with an encoder, the text that it has read, and where that is.
    """

    token_ids: Sequence[int]
    past: int
    blocks: Sequence[int]
    is_scored: bool
    source_tokens: int = 0
    source_blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a step's runs that needed them, in order. The arrays are valid until the next step.

    `logits`: float32 [runs, vocabulary]. `top_ids`: int32 [runs, tops], the best tokens, best first, equal ones in any
    order. `top_logits`: float32 [runs, tops].
    """

    logits: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]


class DecoderModel(Protocol):
    """A loaded decoder. One thread calls it at a time."""

    @property
    def blocks(self) -> int:
        """The number of blocks, which are counted from 0 on."""

    @property
    def block_tokens(self) -> int:
        """The number of tokens for which a block has room."""

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Reads a source: fills blocks with its cross keys and values. Of models with an encoder. As `compute`."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, each from the first to the second, in order. As `compute`."""

    def compute(self, runs: Sequence[Run]) -> Scores:
        """Computes one step, and fills the runs' blocks. Releases the interpreter's lock. Raises RuntimeError."""
