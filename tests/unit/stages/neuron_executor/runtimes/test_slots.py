"""Steps over slots: each text in its own, prompts in parts, copies before anything else, and sources."""

from typing import Any

import numpy as np

from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun, TokenScores
from neuronpipe.stages.neuron_executor.runtimes.slots import SlotModel

_SLOTS, _TOKENS, _CHUNK = 4, 32, 3


class _Graph:
    """The score after a token is the sum of all tokens in its slot, and of its source."""

    def __init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(_SLOTS)]
        self.sources = [[0] * _TOKENS for _ in range(_SLOTS)]
        self.executions = 0

    def read(self, token_ids: Any, count: int, slot: int) -> None:
        assert token_ids.shape == (1, _TOKENS)
        assert not token_ids[0, count:].any()
        self.sources[slot] = token_ids[0].tolist()

    def execute(self, *inputs: Any) -> TokenScores:
        token_ids, past, chunk, copied, *read = inputs
        self.executions += 1
        self.held = [[*self.held[source]] for source in copied]
        for slot in np.flatnonzero(past >= 0):
            self.held[slot][past[slot] :] = [int(token_ids[0, slot])]
        slot, before, count = chunk
        if count:
            self.held[slot][before:] = token_ids[0, _SLOTS : _SLOTS + count].tolist()
        sums = np.array([*map(sum, self.held), sum(self.held[slot])], np.float32)[:, None]
        for of_row, (source, count) in enumerate(read[0] if read else ()):
            sums[of_row] += sum(self.sources[source][:count])
        return TokenScores(
            np.repeat(sums, 5, axis=1), np.zeros((_SLOTS + 1, 1), np.int32), sums, np.zeros(_SLOTS + 1, np.float32)
        )


def _model() -> tuple[SlotModel, _Graph]:
    graph = _Graph()
    return SlotModel(graph, _SLOTS, _TOKENS, _CHUNK), graph


def _sums(model: SlotModel, *runs: DecoderRun) -> list[float]:
    return [float(row[0]) for row in model.compute(runs).logits]


def test_a_prompt_takes_an_execution_for_each_part_and_single_tokens_go_with_the_first() -> None:
    model, graph = _model()
    runs = [DecoderRun([1], 0, [2], 1), DecoderRun([1, 2, 3, 4, 5, 6, 7], 0, [0], 1), DecoderRun([8], 0, [3], 0)]
    assert _sums(model, *runs) == [1, 28]
    assert graph.executions == 3
    assert _sums(model, DecoderRun([9], 7, [0], 1), DecoderRun([2], 1, [2], 1)) == [37, 3]
    assert graph.executions == 4
    assert graph.held == [[1, 2, 3, 4, 5, 6, 7, 9], [], [1, 2], [8]]


def test_scores_are_those_of_the_runs_in_order_whatever_their_lengths() -> None:
    asked = ([3, 4], 0, [1], 1), ([5], 0, [0], 1), ([6, 7], 0, [3], 0), ([8], 0, [2], 1)
    runs = [DecoderRun(*run) for run in asked]
    assert _sums(_model()[0], *runs) == [7, 5, 8]
    assert _sums(_model()[0], DecoderRun([6, 7], 0, [3], 0)) == []


def test_copies_are_made_in_order_before_the_step_and_once() -> None:
    model, graph = _model()
    _sums(model, DecoderRun([1, 2], 0, [0], 1), DecoderRun([5], 0, [1], 1))
    model.copy([(0, 2), (2, 3), (1, 2)])
    assert _sums(model, DecoderRun([10], 2, [0], 1), DecoderRun([20], 2, [3], 1)) == [13, 23]
    assert graph.held == [[1, 2, 10], [5], [5], [1, 2, 20]]
    _sums(model, DecoderRun([30], 3, [3], 1))
    assert graph.held[2] == [5]


def test_rows_see_the_sources_that_were_read_for_them() -> None:
    model, graph = _model()
    model.read([100, 200], [3])
    model.read([1000], [1])
    of_first: dict[str, Any] = {"source_tokens": 2, "source_blocks": [3]}
    of_second: dict[str, Any] = {"source_tokens": 1, "source_blocks": [1]}
    assert _sums(model, DecoderRun([1], 0, [0], 1, **of_first), DecoderRun([2], 0, [2], 1, **of_second)) == [301, 1002]
    # Beams share a source; a prompt has one, too; what was read is not copied with a slot.
    model.copy([(0, 1)])
    found = _sums(model, DecoderRun([4], 1, [0], 1, **of_first), DecoderRun([5, 6, 7, 8], 0, [1], 1, **of_first))
    assert found == [305, 326]
    assert graph.sources[1][0] == 1000
