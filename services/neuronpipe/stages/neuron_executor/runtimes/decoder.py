"""The contract of a loaded decoder with a key-value cache in blocks: tokens of any sequences in, scores out."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError

# The names of a bundle's graphs: of a step over a paged cache, or over one that it gathers itself (decoders.py), and of
# the encoder, if the model has one.
MODEL, GATHERED, ENCODER = "model", "gathered", "encoder"
# Tokens in a block, of OpenVINO's attention on CPUs.
BLOCK_TOKENS = 32
# On CPUs, fewer tokens of a prompt hardly take less time than so many.
PART_TOKENS = 16
# The best tokens that are found for each row: more than transformers' default of top_k, 50. To sort 32 rows of
# 152,000 logits in NumPy takes 447 ms. In the order of ids where logits are equal, and 256 of them, a step of 32 rows
# took 33 ms in place of 19 (measured 2026-11-22, 2 virtual cores, vocabulary of 1,200).
TOP_TOKENS = 64


class DecoderLost(Exception):
    """The device of a decoder does not compute again until the process is restarted."""


def block_count(model_file: Path, block_bytes: int, max_tokens: int, max_bytes: int) -> int:
    """The number of blocks for `max_tokens` tokens, or as many as fit into `max_bytes`.

    Raises SetupError if not even two do.
    """
    blocks = min(-(-max_tokens // BLOCK_TOKENS) + 1, max_bytes // block_bytes)
    if blocks < 2:
        raise SetupError(
            f"{model_file}: a block of its key-value cache takes {block_bytes} bytes, and {max_bytes} are allowed; "
            "allow more with --kv-cache-bytes"
        )
    return blocks


class Run(NamedTuple):
    """Consecutive tokens of one sequence in a step. `past`: its tokens that are in `blocks` already.

    `blocks` has room for both, in order. `scored`: after how many of these tokens, the last ones, scores are needed.
    `source_tokens` and `source_blocks`: of a model with an encoder, the text that it has read, and where that is.
    """

    token_ids: Sequence[int]
    past: int
    blocks: Sequence[int]
    scored: int
    source_tokens: int = 0
    source_blocks: Sequence[int] = ()


class Scores(NamedTuple):
    """The scores after tokens of a step that needed them, in the order of runs. Arrays are valid until the next step.

    `logits`: float32 [rows, vocabulary]. `top_ids`: int32 [rows, tops], the best tokens, best first, equal ones in any
    order. `top_logits`: float32 [rows, tops]. `log_sums`: float32 [rows], log(sum(exp(logits - the best of them))).

    A token's log probability is its logit, less the best one, less the sum's logarithm.
    """

    logits: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    log_sums: NDArray[np.float32]

    @classmethod
    def of_rows(cls, rows: Sequence[tuple["Scores", int]]) -> "Scores":
        """Copies of rows of several steps."""
        return cls._make(np.array([scores[part][row] for scores, row in rows]) for part in range(len(cls._fields)))

    def at(self, rows: slice) -> "Scores":
        """Some of the rows, without a copy."""
        return Scores._make(array[rows] for array in self)


class DecoderModel(Protocol):
    """A loaded decoder. One thread calls it at a time."""

    @property
    def blocks(self) -> int:
        """The number of blocks, which are counted from 0 on."""

    @property
    def block_tokens(self) -> int:
        """The number of tokens for which a block has room."""

    @property
    def scores_all(self) -> bool:
        """Whether it has the scores after all tokens of a run; else only those after the last one."""

    @property
    def part_tokens(self) -> int:
        """The least of a prompt that is worth a step of its own; fewer tokens hardly cost less."""

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Reads a source: fills blocks with its cross keys and values. Of models with an encoder. As `compute`."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, each from the first to the second, in order. As `compute`."""

    def compute(self, runs: Sequence[Run]) -> Scores:
        """Computes one step, and fills the runs' blocks. Releases the interpreter's lock.

        Raises RuntimeError, and DecoderLost.
        """
