"""Reranking equals sentence-transformers' CrossEncoder, through four processes."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from sentence_transformers import CrossEncoder

from neuronpipe.api.v1.tasks_pb2 import RerankInput, ScoreFunction, TaskInput, Truncation
from tests.oracle.conftest import Suite
from tests.oracle.small_models import make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
_IDENTITY = "torch.nn.modules.linear.Identity"
# How each names the function that makes scores of its logits: not at all (sigmoid), and in the ways of version 4 and of
# version 3.
_CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"sentence_transformers": {"activation_fn": _IDENTITY}},
    "XLMRoberta": {"sbert_ce_default_activation_function": _IDENTITY},
}
_MODELS = (*_CONFIGS, "Saved")
_FUNCTIONS: dict[str, tuple["ScoreFunction.ValueType", Any]] = {
    "default": (ScoreFunction.SCORE_FUNCTION_UNSPECIFIED, None),
    "sigmoid": (ScoreFunction.SCORE_FUNCTION_SIGMOID, torch.nn.Sigmoid()),
    "none": (ScoreFunction.SCORE_FUNCTION_NONE, torch.nn.Identity()),
}
_TEXTS = [*PICKED, *generated(31, 24, words=(1, 40)), *generated(32, 4, words=(80, 200))]
_TOP_N = (0, 1, 3)
TASK = "rerank"
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One cross-encoder of each family, and one that sentence-transformers itself saved, with a prompt."""
    folder = tmp_path_factory.mktemp("rankers")
    made = {
        family: make_source(
            folder / family, family, "ForSequenceClassification", max_tokens=_MAX_TOKENS, num_labels=1, **config
        )
        for family, config in _CONFIGS.items()
    }
    with_prompt = CrossEncoder(
        str(made["Bert"]),
        device="cpu",
        prompts={"search": "find what says: "},
        default_prompt_name="search",
        activation_fn=torch.nn.Identity(),
    )
    with_prompt.save_pretrained(str(folder / "Saved"))
    return {**made, "Saved": folder / "Saved"}


def _cases() -> Iterator[tuple[str, list[str], int, str]]:
    """Every text as a query of some others, drawn from a seed, with every function;
    how many are wanted goes in turns."""
    chosen = random.Random(33)
    wanted = itertools.cycle(_TOP_N)
    for query, function in itertools.product(_TEXTS, _FUNCTIONS):
        texts = [chosen.choice(_TEXTS) for _ in range(chosen.randint(1, 8))]
        yield query, texts, min(next(wanted), len(texts)), function


@pytest.mark.parametrize("model", _MODELS)
async def test_rankings_equal_those_of_sentence_transformers(
    model: str, suite: Suite, sources: dict[str, Path]
) -> None:
    compared = suite.comparison(
        f"rerank-{model}", f"CrossEncoder.rank, sentence-transformers {sentence_transformers.__version__}"
    )
    # As here, what looks like a special token in a text is text.
    reference = CrossEncoder(str(sources[model]), device="cpu", processor_kwargs={"split_special_tokens": True})
    answers = await suite.answers(model, _cases(), lambda case: case[2:], lambda case: _input(*case), at_least=150)
    for (query, texts, top_n, function), answer in answers:
        ours = [{"corpus_id": text.index, "score": text.score} for text in answer.result.rerank.texts]
        ranked = reference.rank(query, texts, top_k=top_n or None, activation_fn=_FUNCTIONS[function][1])
        expected = [{"corpus_id": rank["corpus_id"], "score": float(rank["score"])} for rank in ranked]
        compared.compare_ranked((query, texts, top_n, function), ours, expected)
    compared.check(at_least=suite.drawn)


def _input(query: str, texts: list[str], top_n: int, function: str) -> TaskInput:
    number = _FUNCTIONS[function][0]
    return TaskInput(
        rerank=RerankInput(
            query=query, texts=texts, top_n=top_n, function=number, truncation=Truncation.TRUNCATION_RIGHT
        )
    )
