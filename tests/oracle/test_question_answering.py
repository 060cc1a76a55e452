"""Question answering equals QuestionAnsweringPipeline of transformers 4, through four processes."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.api.v1.tasks_pb2 import QuestionAnsweringInput, TaskInput
from tests.models import architectures
from tests.oracle.comparison import Comparison
from tests.oracle.serving import Served
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated
from tests.oracle.transformers4 import Answers, ask
from tests.suite.sampling import Sample

_MAX_TOKENS = 96
_ENCODER_DECODERS = ("BART", "T5")
_QUESTIONS = ("Where is it?", "¿Qué número – 数字 – 🤔?", "What does [SEP] or </i> mean, and to whom?")
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_k": 20, "max_answer_len": 4},
    {"top_k": 5, "handle_impossible_answer": True},
    {"handle_impossible_answer": True, "max_answer_len": 60},
)
_STRIDES = (None, 5, 30)
_SHORT = (*PICKED, *generated(51, 12, words=(1, 30)))
_LONG = generated(52, 10, words=(80, 250))
# Of probabilities the logarithms are compared: a score is the product of two, each of the difference of two logits of
# up to 30.
_TOLERANCE = 3e-4
# With less, float32 has few digits left.
_SMALLEST_SCORE = 1e-30
TASK = "question_answering"
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(asked: Set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("answerers")
    return {
        family: architectures.make_source(folder / family, family, TASK)
        if family in _ENCODER_DECODERS
        else make_source(folder / family, family, "ForQuestionAnswering", max_tokens=_MAX_TOKENS)
        for family in asked
    }


def _cases() -> Iterator[dict[str, Any]]:
    """All contexts with all options; questions in turns; long contexts, which make several windows,
    also with strides."""
    questions = itertools.cycle(_QUESTIONS)
    for context, options in itertools.product(_SHORT, _OPTIONS):
        yield {"question": next(questions), "context": context, **options}
    for context, options, stride in itertools.product(_LONG, _OPTIONS, _STRIDES):
        yield {"question": next(questions), "context": context, **options, **({"doc_stride": stride} if stride else {})}


def _options_of(case: dict[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in case.items() if name != "context"} | {"is long": case["context"] in _LONG}


@dataclass(frozen=True)
class _Reference:
    """The sample's cases, and what transformers 4 answers."""

    cases: list[dict[str, Any]]
    version: str
    answers: dict[str, Answers]


@pytest.fixture(scope="module")
def reference(sources: dict[str, Path], sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> _Reference:
    cases = sample.draw(_cases(), _options_of, at_least=300)
    models = {
        family: (source, transformers.AutoTokenizer.from_pretrained(source)) for family, source in sources.items()
    }
    return _Reference(cases, *ask(models, cases, tmp_path_factory.mktemp("transformers4")))


@pytest.mark.parametrize("family", [*FAMILIES, *_ENCODER_DECODERS])
async def test_answers_equal_those_of_transformers(
    family: str, served: Served, reference: _Reference, comparison: Callable[[str, str], Comparison]
) -> None:
    cases = reference.cases
    compared = comparison(
        f"question_answering-{family}",
        f"QuestionAnsweringPipeline, transformers {reference.version}; logarithms of scores",
    )
    outcomes = await served.infer_all(family, [_input(**case) for case in cases])
    for case, outcome, expected in zip(cases, outcomes, reference.answers[family], strict=True):
        assert outcome.HasField("response"), (case, outcome.error.message)
        ours = [
            {"answer": answer.text, "start": answer.start, "end": answer.end, "score": answer.score}
            for answer in outcome.response.result.question_answering.answers
        ]
        compared.compare_ranked(case, _logarithmic(ours), _logarithmic(expected), tolerance=_TOLERANCE)
    compared.check(at_least=len(cases))


def _logarithmic(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the passages of probability zero with which transformers fills up a long list."""
    return [{**answer, "score": math.log(answer["score"])} for answer in answers if answer["score"] > _SMALLEST_SCORE]


def _input(
    question: str,
    context: str,
    top_k: int = 0,
    max_answer_len: int = 0,
    doc_stride: int = 0,
    handle_impossible_answer: bool = False,
) -> TaskInput:
    return TaskInput(
        question_answering=QuestionAnsweringInput(
            question=question,
            context=context,
            top_k=top_k,
            max_answer_tokens=max_answer_len,
            window_stride_tokens=doc_stride,
            allow_no_answer=handle_impossible_answer,
        )
    )
