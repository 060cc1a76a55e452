"""A beam search that draws has the distribution of transformers' `generate`, for a vocabulary of few tokens."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.tasks.text_options import complete_options
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import written_scores

_VOCABULARY, _END, _PROMPT, _NEW_TOKENS = 8, 3, [1, 5], 3
_DRAWS = 3000
_SPEC = model_spec("text_generation", max_tokens=64, vocabulary_size=_VOCABULARY)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=_END
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # or all texts would be about as likely
    return model


@pytest.fixture(scope="module")
def known() -> dict[tuple[int, ...], np.ndarray]:
    """Logits after texts, which the model computes once for all tests."""
    return {}


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "top_k": 0},
        {"num_beams": 3, "top_k": 4, "temperature": 0.6, "length_penalty": 2.0},
        {"num_beams": 2, "top_k": 0, "top_p": 0.7, "min_p": 0.05},
        {"num_beams": 2, "top_k": 1, "repetition_penalty": 1.4},
    ],
    ids=["all", "top_k and temperature", "top_p and min_p", "the least that is kept"],
)
def test_drawn_texts_have_transformers_distribution(
    model: Any, known: dict[tuple[int, ...], np.ndarray], options: dict[str, Any]
) -> None:
    torch.manual_seed(4)
    found = model.generate(
        torch.tensor([_PROMPT] * _DRAWS),
        attention_mask=torch.ones(_DRAWS, len(_PROMPT), dtype=torch.int64),
        max_new_tokens=_NEW_TOKENS,
        do_sample=True,
        pad_token_id=_END,
        **options,
    )
    theirs = Counter(_text(one) for one in found[:, len(_PROMPT) :].tolist())
    ours = Counter(_text(_search(model, known, seed, options)) for seed in range(_DRAWS))
    # Pearson's test of two samples: see test_sampling.py.
    texts = {text for text in ours | theirs if ours[text] + theirs[text] >= 10}
    pairs = [(ours[text], theirs[text]) for text in sorted(texts)]
    pairs.append((_DRAWS - sum(one for one, _ in pairs), _DRAWS - sum(other for _, other in pairs)))
    statistic = sum((one - other) ** 2 / (one + other) for one, other in pairs if one + other)
    assert len(pairs) > 3
    assert statistic <= len(pairs) + 5 * np.sqrt(2 * len(pairs)) + 10


def _text(token_ids: list[int]) -> tuple[int, ...]:
    return tuple(token_ids[: token_ids.index(_END)] if _END in token_ids else token_ids)


def _search(model: Any, known: dict[tuple[int, ...], np.ndarray], seed: int, given: dict[str, Any]) -> list[int]:
    options = GenerationOptions(max_new_tokens=_NEW_TOKENS, do_sample=True, seed=seed, **given)
    search = BeamSearch(LogitRules(complete_options(options, _SPEC, len(_PROMPT)), len(_PROMPT), [_END]))
    texts = [_PROMPT]
    while texts:
        for text in texts:
            if tuple(text) not in known:
                with torch.no_grad():
                    known[tuple(text)] = model(torch.tensor([text])).logits[0, -1].numpy()
        logits = np.array([known[tuple(text)] for text in texts])
        tops = np.argsort(-logits, axis=1, kind="stable")[:, :6].astype(np.int32)
        texts = [[*texts[step.parent], step.token_id] for step in search.advance(texts, written_scores(logits, tops))]
    return search.best[0].token_ids[len(_PROMPT) :]
