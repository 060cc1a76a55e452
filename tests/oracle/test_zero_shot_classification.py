"""Zero-shot classification equals ZeroShotClassificationPipeline, through four processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from google.rpc import code_pb2

from neuronpipe.api.v1.tasks_pb2 import RerankInput, TaskInput, TextClassificationInput, Truncation
from neuronpipe.api.v1.tasks_pb2 import ZeroShotClassificationInput as ZeroShotInput
from tests.models import architectures
from tests.models.repository import named_labels
from tests.oracle.comparison import pipeline_of, scored
from tests.oracle.conftest import Suite
from tests.oracle.serving import Served
from tests.oracle.small_models import make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
# Where entailment is, and what stands against it, differs: the first label, or where entailment is the first, the last.
_LABELS = {
    "Bert": ["contradiction", "neutral", "entailment"],
    "Roberta": ["ENTAILMENT", "NEUTRAL", "CONTRADICTION"],
    "XLMRoberta": ["not_entailment", "Entailed"],
}
# As bart-large-mnli.
_FAMILIES = (*_LABELS, "BART")
_LONG_LABEL = "a very long label of a good many words for so short a text"
_CANDIDATES = (
    ["urgent"],
    ["urgent", "not urgent"],
    ["politics", "sport", "la météo", "天气", "الطقس", "☀️ weather"],
    ["one, two", "  spaces  ", "ALL CAPS", "x", "[SEP] as text", _LONG_LABEL],
    ["same", "same", "other"],
)
_TEMPLATES = (None, "It is about {}.", "{}", "这个文本是关于{}的。", "👍 {} ! 100 % [SEP]")
_SHORT = [*PICKED, *generated(21, 12, words=(1, 12))]
_LONG = generated(22, 6, words=(80, 200))
TASK = ""  # it is found what the models are for
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("entailment")
    return {
        family: make_source(
            folder / family,
            family,
            "ForSequenceClassification",
            max_tokens=_MAX_TOKENS,
            **named_labels(labels),
        )
        for family, labels in _LABELS.items()
    } | {"BART": architectures.make_source(folder / "BART", "BART", "zero_shot_classification")}


def _cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """All texts with one or many labels true, each with candidates and templates in turns; long ones with every
    template, which are cut.
    """
    candidates, templates = itertools.cycle(_CANDIDATES), itertools.cycle((*_TEMPLATES, _TEMPLATES[0]))
    for text, multi_label, _ in itertools.product(_SHORT, (False, True), range(2)):
        yield (
            text,
            {"candidate_labels": next(candidates), "hypothesis_template": next(templates), "multi_label": multi_label},
        )
    for text, template, multi_label in itertools.product(_LONG, _TEMPLATES, (False, True)):
        yield text, {"candidate_labels": next(candidates), "hypothesis_template": template, "multi_label": multi_label}


@pytest.mark.parametrize("family", _FAMILIES)
async def test_labels_equal_those_of_transformers(family: str, suite: Suite, sources: dict[str, Path]) -> None:
    compared = suite.comparison(
        f"zero_shot_classification-{family}", f"ZeroShotClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = pipeline_of("zero-shot-classification", sources[family])
    answers = await suite.answers(
        family, _cases(), lambda case: case[1], lambda case: _input(case[0], **case[1]), at_least=200
    )
    for (text, options), answer in answers:
        result = pipeline(text, **{name: value for name, value in options.items() if value is not None})
        pairs = zip(result["labels"], result["scores"], strict=True)
        expected = [{"label": label, "score": score} for label, score in pairs]
        compared.compare_ranked((text, options), scored(answer.result.zero_shot_classification.labels), expected)
    compared.check(at_least=suite.drawn)


@pytest.mark.parametrize("family", _LABELS)
async def test_every_token_of_the_pairs_was_used_or_dropped(
    family: str, served: Served, sources: dict[str, Path]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        sources[family], split_special_tokens=True, model_max_length=10_000
    )
    texts = [*_SHORT[:4], *_LONG]
    labels, template = ["urgent", "not so urgent"], "It is {}."
    outcomes = await served.infer_all(family, [_input(text, labels, template, multi_label=False) for text in texts])
    for text, outcome in zip(texts, outcomes, strict=True):
        usage = outcome.response.usage
        whole = sum(len(tokenizer(text, template.format(label))["input_ids"]) for label in labels)
        assert usage.tokens + usage.truncated_tokens == whole
        assert (usage.truncated_tokens > 0) == (text in _LONG)


@pytest.mark.parametrize(("family", "labels"), _LABELS.items(), ids=_LABELS)
async def test_the_same_bundle_answers_text_classification_of_pairs(
    family: str, labels: list[str], suite: Suite, sources: dict[str, Path]
) -> None:
    compared = suite.comparison(
        f"text_classification-of-pairs-{family}", f"TextClassificationPipeline, transformers {transformers.__version__}"
    )
    pairs = list(zip(PICKED, reversed(PICKED), strict=True))
    pipeline = pipeline_of("text-classification", sources[family])
    inputs = [
        TextClassificationInput(text=text, text_pair=pair, top_k=len(labels), truncation=Truncation.TRUNCATION_RIGHT)
        for text, pair in pairs
    ]
    outcomes = await suite.served.infer_all(family, [TaskInput(text_classification=input) for input in inputs])
    for (text, pair), outcome in zip(pairs, outcomes, strict=True):
        ours = scored(outcome.response.result.text_classification.labels)
        expected = pipeline({"text": text, "text_pair": pair}, top_k=None, truncation=True)
        compared.compare_ranked((family, text, pair), ours, expected)
    compared.check(at_least=len(pairs))


@pytest.mark.parametrize("family", ["Bert"])
async def test_a_task_that_the_labels_do_not_allow_is_refused(family: str, served: Served) -> None:
    (outcome,) = await served.infer_all(family, [TaskInput(rerank=RerankInput(query="a", texts=["b"]))])
    assert outcome.error.code == code_pb2.FAILED_PRECONDITION
    assert outcome.error.message == (
        "model 'Bert' supports zero-shot-classification and text-classification, not rerank"
    )


def _input(text: str, candidate_labels: list[str], hypothesis_template: str | None, *, multi_label: bool) -> TaskInput:
    input = ZeroShotInput(text=text, candidate_labels=candidate_labels, multi_label=multi_label)
    input.hypothesis_template, input.truncation = hypothesis_template or "", Truncation.TRUNCATION_RIGHT
    return TaskInput(zero_shot_classification=input)
