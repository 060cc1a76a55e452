"""Tokens are chosen as transformers chooses them: its logits processors, for the same scores, are the reference."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TokenBias
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.sampling import NotFinite, TokenChooser
from neuronpipe.tasks.text_options import complete_options
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import written_scores

_VOCABULARY = 40
_TOPS = 16
_SPEC = model_spec("text_generation", vocabulary_size=_VOCABULARY)
_END = 3


def _logits(seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(_VOCABULARY) * 2).astype(np.float32)


def _choose(logits: np.ndarray, token_ids: list[int], prompt_tokens: int = 1, sequence: int = 0, **options: Any) -> int:
    complete = complete_options(GenerationOptions(max_new_tokens=8, **options), _SPEC, prompt_tokens)
    chooser = TokenChooser(LogitRules(complete, prompt_tokens, [_END]), sequence)
    tops = np.argsort(-logits, kind="stable")[:_TOPS].astype(np.int32)
    return chooser.choose(token_ids, written_scores(logits[None], tops[None]))


def _probabilities(logits: np.ndarray, processors: list[Any]) -> np.ndarray:
    scores = torch.from_numpy(logits[None].copy())
    for processor in processors:
        scores = processor(torch.tensor([[1]]), scores)
    return np.asarray(scores.softmax(dim=-1)[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
@pytest.mark.parametrize("count", [6, _VOCABULARY])  # with all, a logit below 1 would be best if it were multiplied
def test_greedy_with_a_penalty_is_transformers(seed: int, penalty: float, count: int) -> None:
    logits, seen = _logits(seed), [int(one) for one in np.argsort(-_logits(seed))[:count]]
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    expected = int(processor(torch.tensor([seen]), torch.from_numpy(logits[None].copy())).argmax())
    assert _choose(logits, seen, repetition_penalty=penalty) == expected


@pytest.mark.parametrize("seed", range(5))
def test_biases_are_transformers_sequence_bias_of_single_tokens(seed: int) -> None:
    logits, chance = _logits(seed), np.random.default_rng(seed)
    biases = {int(token): float(chance.uniform(-6, 6)) for token in chance.choice(_VOCABULARY, 8, replace=False)}
    processor = logits_process.SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    expected = int(processor(torch.tensor([[1, 2]]), torch.from_numpy(logits[None].copy())).argmax())
    given = [TokenBias(token_id=token, bias=bias) for token, bias in biases.items()]
    assert _choose(logits, [1, 2], logit_bias=given) == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, 1.2), (-2, 0.7), (2, 2)])
def test_penalties_count_the_tokens_of_the_text(seed: int, presence: float, frequency: float) -> None:
    """By OpenAI's formula: mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence."""
    logits = _logits(seed)
    best = [int(one) for one in np.argsort(-logits)[:4]]
    prompt, text = [best[3], best[3], best[0]], [best[0], best[1], best[0], best[2]]
    counts = np.bincount(text, minlength=_VOCABULARY)
    expected = int((logits - counts * frequency - (counts > 0) * presence).argmax())
    given: Any = {"presence_penalty": presence, "frequency_penalty": frequency}
    assert _choose(logits, [*prompt, *text], prompt_tokens=len(prompt), **given) == expected


def test_no_end_before_min_new_tokens() -> None:
    logits = _logits()
    logits[_END] = 100
    assert _choose(logits, [1, 2, 2], min_new_tokens=2) == _END
    assert _choose(logits, [1, 2], min_new_tokens=2) == int(np.argsort(-logits)[1])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-300},
        {"temperature": 0.001},
        {"temperature": 1e-8},
        {"top_p": 0.0},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 100.0, "top_p": 1e-12, "min_p": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [0, 5])
def test_of_a_single_token_that_is_left_it_is_the_best_one(options: dict[str, Any], top_k: int) -> None:
    """Also at the ends of float64, beyond what requests may have: a model's generation_config may say anything."""
    logits = _logits() * np.float32(1e4)
    with np.errstate(all="raise", under="ignore", over="ignore"):
        drawn = {_choose(logits, [1], do_sample=True, seed=seed, top_k=top_k, **options) for seed in range(20)}
    assert drawn == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"top_k": 0}, []),
        ({"top_k": 5}, [logits_process.TopKLogitsWarper(5)]),
        ({"top_k": 30}, [logits_process.TopKLogitsWarper(30)]),
        ({"top_k": 0, "temperature": 0.5}, [logits_process.TemperatureLogitsWarper(0.5)]),
        (
            {"top_k": 12, "temperature": 1.7, "top_p": 0.8},
            [
                logits_process.TemperatureLogitsWarper(1.7),
                logits_process.TopKLogitsWarper(12),
                logits_process.TopPLogitsWarper(0.8),
            ],
        ),
        ({"top_k": 0, "top_p": 0.6}, [logits_process.TopPLogitsWarper(0.6)]),
        ({"top_k": 0, "min_p": 0.2}, [logits_process.MinPLogitsWarper(0.2)]),
    ],
    ids=["all", "top_k", "top_k beyond the graph's", "temperature", "three", "top_p", "min_p"],
)
def test_drawn_tokens_have_transformers_distribution(options: dict[str, Any], processors: list[Any]) -> None:
    logits, draws = _logits(1), 4000
    expected = _probabilities(logits, processors)
    counts = np.zeros(_VOCABULARY)
    for seed in range(draws):
        counts[_choose(logits, [1], do_sample=True, seed=seed, **options)] += 1
    assert not counts[expected == 0].any()
    # Pearson's test: its statistic exceeds the degrees of freedom by five standard deviations once in a million.
    is_likely = expected * draws >= 5
    observed = np.append(counts[is_likely], counts[~is_likely].sum())
    wanted = np.append(expected[is_likely], expected[~is_likely].sum()) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert ((observed - wanted) ** 2 / wanted).sum() <= freedom + 5 * np.sqrt(2 * max(freedom, 1)) + 10


def test_a_seed_draws_anew_at_each_position() -> None:
    logits = np.zeros(_VOCABULARY, np.float32)
    drawn = [_choose(logits, [1] * count, do_sample=True, seed=7, top_k=0) for count in range(1, 30)]
    assert len(set(drawn)) > 10
    assert drawn == [_choose(logits, [1] * count, do_sample=True, seed=7, top_k=0) for count in range(1, 30)]


def test_each_text_of_a_seed_draws_its_own_numbers() -> None:
    logits = np.zeros(_VOCABULARY, np.float32)

    def text(seed: int, sequence: int) -> list[int]:
        options = {"do_sample": True, "seed": seed, "top_k": 0, "sequence": sequence}
        return [_choose(logits, [1] * count, **options) for count in range(1, 20)]

    texts = [text(seed, sequence) for seed in (7, 8) for sequence in range(3)]
    assert len({tuple(one) for one in texts}) == 6
    assert texts == [text(seed, sequence) for seed in (7, 8) for sequence in range(3)]


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NotFinite):
        _choose(np.full(_VOCABULARY, np.nan, np.float32), [1])
