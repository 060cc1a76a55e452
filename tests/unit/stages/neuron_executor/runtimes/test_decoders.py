"""runtimes/decoders.py: the form that gathers blocks, over a graph that is written here."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.stages.neuron_executor.runtimes.decoder import BLOCK_TOKENS, DecoderRun, TokenScores
from neuronpipe.stages.neuron_executor.runtimes.decoders import GatheredModel

_BLOCKS, _VOCABULARY = 8, 50


class _Graph:
    """One layer of a head of width 1. The keys and values of a token are its id; the scores are the sum of all."""

    def __init__(self) -> None:
        self.cache: Any = np.full((2, _BLOCKS, 1, BLOCK_TOKENS, 1), np.nan, np.float32)
        self.steps: list[dict[str, Any]] = []

    def step(self, inputs: dict[str, Any]) -> tuple[TokenScores, Any]:
        self.steps.append(inputs)
        new = inputs["input_ids"].astype(np.float32)
        sums = np.zeros(len(new), np.float32)
        for name, filled in ("blocks", "past"), ("source_blocks", "source_tokens"):
            if name in inputs:
                held = self.cache[0, inputs[name], 0, :, 0].reshape(len(new), -1)
                is_held = np.arange(held.shape[1]) < inputs[filled][:, None]
                sums += (held * is_held).sum(axis=1)  # NaN of others would spread, as with real attention
        logits = np.repeat((sums + new.sum(axis=1))[:, None], _VOCABULARY, axis=1)
        computed = np.broadcast_to(new[:, :, None, None, None], (*new.shape, 2, 1, 1))
        return TokenScores(
            logits, np.zeros((len(new), 1), np.int32), logits[:, :1], np.zeros(len(new), np.float32)
        ), computed

    def read(self, token_ids: Any) -> Any:
        return np.broadcast_to(token_ids.astype(np.float32)[None, :, :, None], (2, 1, token_ids.shape[1], 1))


def _sums(model: GatheredModel, *runs: DecoderRun) -> list[float]:
    return [float(row[0]) for row in model.compute(runs).logits]


def test_parts_of_texts_are_written_behind_each_other() -> None:
    graph = _Graph()
    model = GatheredModel(graph)
    ids = list(range(1, 71))
    assert _sums(model, DecoderRun(ids[:20], 0, [5], 0)) == []
    assert _sums(model, DecoderRun(ids[20:69], 20, [5, 2, 7], 0), DecoderRun([9], 0, [1], 1)) == [9]
    assert _sums(model, DecoderRun(ids[69:], 69, [5, 2, 7], 1), DecoderRun([4], 1, [1], 1)) == [sum(ids), 13]
    assert [step["input_ids"].shape for step in graph.steps] == [(1, 20), (1, 49), (1, 1), (2, 1)]
    assert graph.steps[-1]["blocks"].tolist() == [[5, 2, 7], [1, 1, 1]], "filled up with its own block"


def test_scores_are_those_of_the_runs_in_order_whatever_their_lengths() -> None:
    asked = ([3, 4], 0, [0], 1), ([5], 0, [1], 1), ([6, 7], 0, [2], 0), ([8], 0, [3], 1)
    runs = [DecoderRun(*run) for run in asked]
    assert _sums(GatheredModel(_Graph()), *runs) == [7, 5, 8]


def test_a_source_is_read_once_and_seen_by_its_rows() -> None:
    model = GatheredModel(_Graph())
    model.read(list(range(40)), [6, 4])
    runs = [DecoderRun([1], 0, [block], 1, 40, [6, 4]) for block in (0, 1)]
    assert _sums(model, *runs) == [sum(range(40)) + 1] * 2


def test_a_copied_block_is_its_own_from_then_on() -> None:
    model = GatheredModel(_Graph())
    _sums(model, DecoderRun([1, 2], 0, [0], 1))
    model.copy([(0, 3)])
    assert _sums(model, DecoderRun([10], 2, [0], 1), DecoderRun([20], 2, [3], 1)) == [13, 23]
    assert _sums(model, DecoderRun([0], 3, [0], 1), DecoderRun([0], 3, [3], 1)) == [13, 23]


@pytest.mark.parametrize("past", [0, 31, 32])
def test_what_was_not_finite_in_a_block_is_gone_before_it_is_used_again(past: int) -> None:
    model = GatheredModel(_Graph())  # whose blocks are all NaN
    if past:
        _sums(model, DecoderRun([1] * past, 0, [0, 1], 0))
    assert _sums(model, DecoderRun([1], past, [0, 1], 1)) == [past + 1]
