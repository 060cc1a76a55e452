"""Text classification equals TextClassificationPipeline, through four processes."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import transformers

from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TextClassificationInput, Truncation
from tests.oracle.comparison import Comparison
from tests.oracle.serving import Served, serving
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated
from tests.suite.sampling import Sample

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
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def classifier_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    return {
        name: make_source(folder / name, family, "ForSequenceClassification", max_tokens=_MAX_TOKENS, **changes)
        for name, (family, changes) in _MODELS.items()
    }


@pytest_asyncio.fixture(scope="module")
async def served(
    asked: Set[str], classifier_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    sources = {name: ("text_classification", source) for name, source in classifier_sources.items() if name in asked}
    async with serving(tmp_path_factory.mktemp("repository"), sources) as running:
        yield running


def _cases(labels: int) -> Iterator[tuple[str, str | None, str | None, int, str]]:
    """Texts, every third with a pair, with all score functions; numbers of labels and sides of truncation in turns."""
    top_k, sides = itertools.cycle(range(1, labels + 1)), itertools.cycle(_TRUNCATIONS)
    for (number, text), function in itertools.product(enumerate(_TEXTS), _FUNCTIONS):
        yield text, _TEXTS[-number - 1] if number % 3 == 0 else None, function, next(top_k), next(sides)


@pytest.mark.parametrize("model", _MODELS)
async def test_labels_equal_those_of_transformers(
    model: str,
    served: Served,
    classifier_sources: dict[str, Path],
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
) -> None:
    compared = comparison(
        f"text_classification-{model}", f"TextClassificationPipeline, transformers {transformers.__version__}"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier_sources[model], split_special_tokens=True)
    pipeline = transformers.pipeline(
        "text-classification", model=str(classifier_sources[model]), tokenizer=tokenizer, device="cpu"
    )
    cases = sample.draw(_cases(_MODELS[model][1]["num_labels"]), lambda case: (bool(case[1]), *case[2:]), at_least=180)
    outcomes = await served.infer_all(model, [_input(*case) for case in cases])
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.HasField("response"), (case, outcome.error.message)
        text, pair, function, top_k, side = case
        tokenizer.truncation_side = side
        (expected,) = pipeline(
            [{"text": text, "text_pair": pair}], function_to_apply=function, top_k=top_k, truncation=True
        )
        usage = outcome.response.usage
        assert usage.tokens + usage.truncated_tokens == len(tokenizer(text, pair)["input_ids"]), case
        labels = outcome.response.result.text_classification.labels
        compared.compare_ranked(case, [{"label": one.label, "score": one.score} for one in labels], expected)
    compared.check(at_least=len(cases))


def _input(text: str, pair: str | None, function: str | None, top_k: int, side: str) -> TaskInput:
    return TaskInput(
        text_classification=TextClassificationInput(
            text=text, text_pair=pair or "", top_k=top_k, function=_FUNCTIONS[function], truncation=_TRUNCATIONS[side]
        )
    )
