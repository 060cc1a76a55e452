"""A decoder over a cache in blocks whose graph gathers the keys and values of each row itself.

GatheredModel serves models with position biases, which paged attention does not support, and runtimes without paged
attention. It writes the new keys and values of a step to the blocks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from neuronpipe.stages.neuron_executor.runtimes.decoder import BLOCK_TOKENS, PART_TOKENS, DecoderRun, TokenScores


class GatheringGraph(Protocol):
    """The graph of a model, which contains the model's cache.

    `cache`: an array of NumPy or PyTorch [2 * layers, blocks, heads, BLOCK_TOKENS, width]. The keys and values of the
    layers alternate.
    """

    cache: Any

    def step(self, inputs: dict[str, NDArray[np.int64]]) -> tuple[TokenScores, Any]:
        """Computes the scores of each row, and the keys and values of its new tokens. Raises RuntimeError.

        `inputs`: see `_inputs`. The keys and values: [rows, new, 2 * layers, heads, width].
        """

    def read(self, token_ids: NDArray[np.int64]) -> Any:
        """Computes the keys and values that the text gets from its source, [2 * layers, heads, tokens, width].

        Only for models with an encoder. `token_ids`: [1, tokens]. Raises RuntimeError.
        """


class GatheredModel:
    """A decoder whose graph gathers its cache; see DecoderModel."""

    block_tokens = BLOCK_TOKENS
    part_tokens = PART_TOKENS
    scores_all = False

    def __init__(self, graph: GatheringGraph) -> None:
        self.blocks = int(graph.cache.shape[1])
        self._graph = graph
        self._cache = graph.cache

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        computed = self._graph.read(np.array([token_ids], np.int64))
        self._cache[:, list(blocks)] = 0
        for number, block in enumerate(blocks):
            part = computed[:, :, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            self._cache[:, block, :, : part.shape[2]] = part

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        for source, target in blocks:
            self._cache[:, target] = self._cache[:, source]

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        """See DecoderModel. Runs of one length are computed together, without padding."""
        # Masked values have a weight of zero, but zero times the NaN of a former text is NaN.
        if begun := [block for run in runs for block in _begun(run)]:
            self._cache[:, begun] = 0
        by_length: dict[int, list[int]] = {}
        for place, run in enumerate(runs):
            by_length.setdefault(len(run.token_ids), []).append(place)
        by_place: dict[int, tuple[TokenScores, int]] = {}
        for places in by_length.values():
            together = [runs[place] for place in places]
            scores, new = self._graph.step(_inputs(together))
            self._write(together, new)
            if len(by_length) > 1:  # the graph may reuse the memory of its outputs
                scores = TokenScores._make(array.copy() for array in scores)
            by_place |= {place: (scores, row) for row, place in enumerate(places)}
        chosen = [by_place[place] for place, run in enumerate(runs) if run.scored]
        if len(by_length) == 1 and len(chosen) == len(runs):
            return scores
        return TokenScores.of_rows(chosen)

    def _write(self, runs: Sequence[DecoderRun], new: Any) -> None:
        positions = [(run, run.past + number) for run in runs for number in range(len(run.token_ids))]
        blocks = [run.blocks[position // BLOCK_TOKENS] for run, position in positions]
        offsets = [position % BLOCK_TOKENS for _, position in positions]
        self._cache[:, blocks, :, offsets] = new.reshape(len(positions), *new.shape[2:])


def _begun(run: DecoderRun) -> Sequence[int]:
    """Returns the blocks whose first token is computed in this run."""
    first, end = -(-run.past // BLOCK_TOKENS), -(-(run.past + len(run.token_ids)) // BLOCK_TOKENS)
    return run.blocks[first:end]


def _inputs(runs: Sequence[DecoderRun]) -> dict[str, NDArray[np.int64]]:
    """Makes the inputs of a step of rows of one length.

    - `input_ids`: [rows, new].
    - `past`: [rows], number of tokens in the blocks.
    - `blocks`: [rows, most], filled up.
    - `source_tokens`, `source_blocks`: for models with an encoder only.
    """
    inputs = {
        "input_ids": np.array([run.token_ids for run in runs], np.int64),
        "past": np.array([run.past for run in runs], np.int64),
        "blocks": _table([run.blocks[: max(1, -(-run.past // BLOCK_TOKENS))] for run in runs]),
    }
    if runs[0].source_tokens:
        inputs["source_tokens"] = np.array([run.source_tokens for run in runs], np.int64)
        inputs["source_blocks"] = _table([run.source_blocks for run in runs])
    return inputs


def _table(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Makes a table of the blocks of each row, filled up with the row's first block."""
    most = max(map(len, rows))
    return np.array([[*row, *[row[0]] * (most - len(row))] for row in rows], np.int64)
