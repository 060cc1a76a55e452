"""Token classification equals TokenClassificationPipeline, through four processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.api.v1.tasks_pb2 import Aggregation, TaskInput, TokenClassificationInput, Truncation
from tests.models.repository import named_labels
from tests.oracle.comparison import pipeline_of
from tests.oracle.conftest import Suite
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC-LAW", "NOUN"]
_AGGREGATIONS = {
    None: Aggregation.AGGREGATION_UNSPECIFIED,
    "none": Aggregation.AGGREGATION_NONE,
    "simple": Aggregation.AGGREGATION_SIMPLE,
    "first": Aggregation.AGGREGATION_FIRST,
    "average": Aggregation.AGGREGATION_AVERAGE,
    "max": Aggregation.AGGREGATION_MAX,
}
_IGNORED: tuple[list[str] | None, ...] = (None, [], ["PER", "B-PER"], ["O", "NOUN", "LAW"])
_SHORT = [*PICKED, *generated(11, 16, words=(1, 12))]
_LONG = generated(12, 8, words=(80, 200))
_STRIDES = (1, 10, 40)
# The pipeline says of each tokenizer but BERT's that it does not know words.
TASK = "token_classification"
pytestmark = [pytest.mark.sampled, pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("taggers")
    labels = named_labels(_LABELS)
    return {
        family: make_source(folder / family, family, "ForTokenClassification", max_tokens=_MAX_TOKENS, **labels)
        for family in FAMILIES
    }


def _cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Texts and options of the pipeline: all aggregations with all texts, ignored labels in turns, windows for texts of
    many tokens.
    """
    ignored = itertools.cycle(_IGNORED)
    for text, aggregation in itertools.product(_SHORT, _AGGREGATIONS):
        yield text, {"aggregation_strategy": aggregation, "ignore_labels": next(ignored)}
    for text, stride, aggregation in itertools.product(_LONG, _STRIDES, _AGGREGATIONS):
        if aggregation != "none":
            yield text, {"aggregation_strategy": aggregation, "ignore_labels": next(ignored), "stride": stride}
    for text, aggregation in itertools.product(_LONG, _AGGREGATIONS):  # the pipeline cuts at the end
        yield text, {"aggregation_strategy": aggregation}


@pytest.mark.parametrize("family", FAMILIES)
async def test_entities_equal_those_of_transformers(family: str, suite: Suite, sources: dict[str, Path]) -> None:
    compared = suite.comparison(
        f"token_classification-{family}", f"TokenClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = pipeline_of("token-classification", sources[family])
    answers = await suite.answers(
        family, _cases(), lambda case: case[1], lambda case: _input(case[0], **case[1]), at_least=400
    )
    for (text, options), answer in answers:
        ours = [
            (entity.label, entity.score, entity.text, entity.start, entity.end)
            for entity in answer.result.token_classification.entities
        ]
        given = {name: value for name, value in options.items() if value is not None}
        expected = []
        for entity in pipeline(text, **given):
            start, end, label = entity["start"], entity["end"], entity.get("entity") or entity["entity_group"]
            expected.append((label, float(entity["score"]), text[start:end], start, end))
        compared.compare((text, options), ours, expected)
    compared.check(at_least=suite.drawn)


def _input(
    text: str, *, aggregation_strategy: str | None, ignore_labels: list[str] | None = None, stride: int = 0
) -> TaskInput:
    input = TokenClassificationInput(
        text=text,
        aggregation=_AGGREGATIONS[aggregation_strategy],
        ignore_labels=ignore_labels or [],
        keep_all_labels=ignore_labels == [],
        window_stride_tokens=stride,
        truncation=Truncation.TRUNCATION_UNSPECIFIED if stride else Truncation.TRUNCATION_RIGHT,
    )
    return TaskInput(token_classification=input)
