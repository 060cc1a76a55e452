"""Text classification equals TextClassificationPipeline, through four processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TextClassificationInput, Truncation
from tests.oracle.comparison import pipeline_of, scored
from tests.oracle.conftest import Suite
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
# model → (family, its configuration's changes): one right label, any number of them, and a number to predict.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"num_labels": 5}) for family in FAMILIES},
    "multi-label": ("Roberta", {"num_labels": 4, "problem_type": "multi_label_classification"}),
    "one-label": ("XLMRoberta", {"num_labels": 1}),
    "regression": ("Bert", {"num_labels": 1, "problem_type": "regression"}),
}
_FUNCTIONS = {
    None: ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
    "softmax": ScoreFunction.SCORE_FUNCTION_SOFTMAX,
    "sigmoid": ScoreFunction.SCORE_FUNCTION_SIGMOID,
    "none": ScoreFunction.SCORE_FUNCTION_NONE,
}
_TRUNCATIONS = {"right": Truncation.TRUNCATION_RIGHT, "left": Truncation.TRUNCATION_LEFT}
_TEXTS = (*PICKED, *generated(31, 16, words=(1, 30)), *generated(32, 6, words=(60, 150)))
TASK = "text_classification"
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    return {
        name: make_source(folder / name, family, "ForSequenceClassification", max_tokens=_MAX_TOKENS, **changes)
        for name, (family, changes) in _MODELS.items()
    }


def _cases(labels: int) -> Iterator[tuple[str, str | None, str | None, int, str]]:
    """Texts, every third with a pair, with all score functions; numbers of labels and sides of truncation in turns."""
    top_k, sides = itertools.cycle(range(1, labels + 1)), itertools.cycle(_TRUNCATIONS)
    for (number, text), function in itertools.product(enumerate(_TEXTS), _FUNCTIONS):
        yield text, _TEXTS[-number - 1] if number % 3 == 0 else None, function, next(top_k), next(sides)


@pytest.mark.parametrize("model", _MODELS)
async def test_labels_equal_those_of_transformers(model: str, suite: Suite, sources: dict[str, Path]) -> None:
    compared = suite.comparison(
        f"text_classification-{model}", f"TextClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = pipeline_of("text-classification", sources[model])
    cases = _cases(_MODELS[model][1]["num_labels"])
    answers = await suite.answers(
        model, cases, lambda case: (bool(case[1]), *case[2:]), lambda case: _input(*case), at_least=180
    )
    for case, answer in answers:
        text, pair, function, top_k, side = case
        pipeline.tokenizer.truncation_side = side
        (expected,) = pipeline(
            [{"text": text, "text_pair": pair}], function_to_apply=function, top_k=top_k, truncation=True
        )
        usage = answer.usage
        assert usage.tokens + usage.truncated_tokens == len(pipeline.tokenizer(text, pair)["input_ids"]), case
        compared.compare_ranked(case, scored(answer.result.text_classification.labels), expected)
    compared.check(at_least=suite.drawn)


def _input(text: str, pair: str | None, function: str | None, top_k: int, side: str) -> TaskInput:
    return TaskInput(
        text_classification=TextClassificationInput(
            text=text, text_pair=pair or "", top_k=top_k, function=_FUNCTIONS[function], truncation=_TRUNCATIONS[side]
        )
    )
