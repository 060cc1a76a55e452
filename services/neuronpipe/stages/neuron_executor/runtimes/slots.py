"""A decoder over a cache in slots, for devices that compute fixed shapes only: a slot has room for one longest text.

One graph, which keeps the cache, computes every step: a token of each slot, and a part of one prompt. With an encoder,
a slot also has room for the keys and values of one longest source.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from neuronpipe.stages.neuron_executor.runtimes.decoder import ENCODER, DecoderRun, TokenScores

# Maximum number of tokens of a prompt in one execution, and the property of an artefact with this number. With 64 slots
# they fill the 128 rows that a core of Inf2 multiplies at once.
CHUNK_TOKENS, CHUNK_PROPERTY = 64, "chunk_tokens"
_ENCODER_PREFIX = f"{ENCODER}-"


def encoder_file(bucket: object) -> str:
    """Names the trace that reads sources, without its suffix. The trace of steps has the bucket's name."""
    return f"{_ENCODER_PREFIX}{bucket}"


def split_name(name: str) -> tuple[str, bool]:
    """Returns the name of the bucket in the name of a trace, and whether the trace reads sources."""
    return name.removeprefix(_ENCODER_PREFIX), name.startswith(_ENCODER_PREFIX)


class SlotGraph(Protocol):
    """The graph of a model, with its cache."""

    def execute(self, *inputs: NDArray[np.int64]) -> TokenScores:
        """Computes the scores after the token of each slot, and after the part of a prompt: [slots + 1, ...].

        Inputs in order:

        - `token_ids`, [1, slots + chunk]: a token for each slot, then the part of the prompt.
        - `past`, [slots]: number of tokens before the token in its slot; -1: the slot gets no token, and its row has no
          meaning.
        - `chunk`: the slot of the part, the number of tokens before it there, and its length. With a length of 0, its
          row has no meaning.
        - `copied`, [slots]: the slot from which each slot's content is copied first.
        - `read`, [slots + 1, 2], only with an encoder: the slot of each row's source, and the number of its tokens.

        The graph empties the slots behind their new tokens. Raises RuntimeError, and DecoderLost.
        """

    def read(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        """Reads a source into a slot: the first `count` of `token_ids`, [1, tokens of a slot].

        Only for models with an encoder. Raises the errors of `execute`.
        """


class SlotModel:
    """A decoder over a cache in slots, each of which is a block; see DecoderModel."""

    scores_all = False

    def __init__(self, graph: SlotGraph, slots: int, slot_tokens: int, chunk_tokens: int) -> None:
        self.blocks = slots
        self.block_tokens = slot_tokens
        self.part_tokens = chunk_tokens
        self._graph = graph
        self._copied = np.arange(slots, dtype=np.int64)

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        (slot,) = blocks
        padded = np.zeros((1, self.block_tokens), np.int64)
        padded[0, : len(token_ids)] = token_ids
        self._graph.read(padded, len(token_ids), slot)

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """See DecoderModel. The next execution copies the blocks."""
        for source, target in blocks:
            self._copied[target] = self._copied[source]

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        """See DecoderModel. Each part of a prompt takes an execution, the first of which also has all single tokens."""
        slots = self.blocks
        singles = {run.blocks[0]: run for run in runs if len(run.token_ids) == 1}
        read = {run.blocks[0]: (run.source_blocks[0], run.source_tokens) for run in runs if run.source_tokens}
        last_scores: dict[int, tuple[TokenScores, int]] = {}
        for number, (slot, first, part) in enumerate(self._parts(runs)):
            token_ids = np.zeros((1, slots + self.part_tokens), np.int64)
            past = np.full(slots, -1, np.int64)
            if number == 0:
                for single_slot, run in singles.items():
                    token_ids[0, single_slot], past[single_slot] = run.token_ids[0], run.past
            token_ids[0, slots : slots + len(part)] = part
            inputs = [token_ids, past, np.array([slot, first, len(part)]), self._copied.copy()]
            if read:
                inputs.append(np.array([read.get(row, (0, 1)) for row in (*range(slots), slot)]))
            scores = self._graph.execute(*inputs)
            self._copied[:] = np.arange(slots)
            if number == 0:
                last_scores |= {single_slot: (scores, single_slot) for single_slot in singles}
            if part:
                last_scores[slot] = scores, slots  # the last part of a run counts
        return TokenScores.of_rows([last_scores[run.blocks[0]] for run in runs if run.scored])

    def _parts(self, runs: Sequence[DecoderRun]) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yields the slot, the tokens before, and the tokens of each part of a prompt.

        Yields an empty part if no prompt is read.
        """
        longer = [run for run in runs if len(run.token_ids) > 1]
        for run in longer:
            for first in range(0, len(run.token_ids), self.part_tokens):
                yield run.blocks[0], run.past + first, run.token_ids[first : first + self.part_tokens]
        if not longer:
            yield 0, 0, ()
