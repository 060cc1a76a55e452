"""The contract of a loaded decoder with a key-value cache in blocks: tokens of any sequences in, scores out."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError

# The names of a bundle's graphs: a step over a paged cache, a step that gathers its cache itself (decoders.py), and the
# encoder, if the model has an encoder.
MODEL, GATHERED, ENCODER = "model", "gathered", "encoder"
# Tokens in a block of OpenVINO's attention on CPUs.
BLOCK_TOKENS = 32
# On CPUs, fewer tokens of a prompt than this number hardly take less time.
PART_TOKENS = 16
# Number of best tokens that are found for each row: more than transformers' default of top_k, 50. Sorting 32 rows of
# 152,000 logits in NumPy takes 447 ms. With 256 tokens, and equal logits in the order of ids, a step of 32 rows took
# 33 ms instead of 19 (measured 2026-11-22, 2 virtual cores, vocabulary of 1,200).
TOP_TOKENS = 64


class DecoderLost(Exception):
    """The device of a decoder does not compute again until the process is restarted."""


def block_count(model_file: Path, block_bytes: int, max_tokens: int, max_bytes: int) -> int:
    """Counts the blocks for `max_tokens` tokens, or the blocks that fit into `max_bytes` if these are fewer.

    Raises SetupError if fewer than two fit.
    """
    blocks = min(-(-max_tokens // BLOCK_TOKENS) + 1, max_bytes // block_bytes)
    if blocks < 2:
        raise SetupError(
            f"{model_file}: a block of its key-value cache takes {block_bytes} bytes, and {max_bytes} are allowed; "
            "allow more with --kv-cache-bytes"
        )
    return blocks


def decoder_file(model: str, backend: str, files: Sequence[Path]) -> Path:
    """Returns the file of an artefact with the graph of a decoder's step. Raises SetupError if there is none."""
    for path in files:
        if path.stem in (MODEL, GATHERED) and path.suffix != ".bin":
            return path
    raise SetupError(f"model {model!r}: its {backend} artefact names no file of a model; compile it again")


class DecoderRun(NamedTuple):
    """Consecutive tokens of one sequence in a step. `past`: number of its tokens that are already in `blocks`.

    - `blocks`: have room for both, in order.
    - `scored`: number of last tokens after which scores are needed.
    - `source_tokens`, `source_blocks`: the text that an encoder has read, and its blocks.
    """

    token_ids: Sequence[int]
    past: int
    blocks: Sequence[int]
    scored: int
    source_tokens: int = 0
    source_blocks: Sequence[int] = ()


class TokenScores(NamedTuple):
    """The scores after the scored tokens of a step, in the order of runs. The arrays are valid until the next step.

    - `logits`: float32 [rows, vocabulary].
    - `top_ids`: int32 [rows, tops], best tokens first, equal tokens in any order.
    - `top_logits`: float32 [rows, tops].
    - `log_sums`: float32 [rows], log(sum(exp(logits - best logit))).

    The log probability of a token is its logit minus the best logit minus the row's log sum.
    """

    logits: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    log_sums: NDArray[np.float32]

    @classmethod
    def of_rows(cls, rows: Sequence[tuple["TokenScores", int]]) -> "TokenScores":
        """Copies of rows of several steps."""
        return cls._make(np.array([scores[part][row] for scores, row in rows]) for part in range(len(cls._fields)))

    def at(self, rows: slice) -> "TokenScores":
        """Returns the scores of a range of rows, without a copy."""
        return TokenScores._make(array[rows] for array in self)


class DecoderModel(Protocol):
    """A loaded decoder. One thread calls it at a time."""

    @property
    def blocks(self) -> int:
        """The number of blocks, which are numbered from 0."""

    @property
    def block_tokens(self) -> int:
        """The number of tokens for which a block has room."""

    @property
    def scores_all(self) -> bool:
        """Whether it returns scores after all tokens of a run, or only after the last token."""

    @property
    def part_tokens(self) -> int:
        """The fewest tokens of a prompt that are worth a step; a step of fewer takes nearly as long."""

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Fills blocks with the cross keys and values of a source. Needs an encoder. Raises the errors of `compute`."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies blocks in order, given as pairs (from, to). Raises the errors of `compute`."""

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        """Computes one step, and fills the runs' blocks. Releases the interpreter's lock.

        Raises RuntimeError, and DecoderLost.
        """
