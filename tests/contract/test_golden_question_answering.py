"""Question answering equals the pipeline of transformers 4, whose answers are in golden/question_answering.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import QuestionAnsweringInput, QuestionAnsweringResult, TaskInput
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from neuronpipe.tasks import question_answering
from tests.contract.golden_question_answering import GOLDEN_FILE, weights_digest
from tests.contract.inference import infer_all
from tests.models.repository import make_repository

_GOLDEN: dict[str, Any] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))

# The logits of PyTorch and OpenVINO differ by up to 1e-5 (measured; 5e-5 leaves room for other CPUs). Two of them and
# the two sums of exponentials that they are divided by make a score: its relative error is at most four times that. Far
# below SMALLEST_GAP.
_SCORE_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def answerer(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, compiled by the transformers of this run, which may need no other model."""
    folder = tmp_path_factory.mktemp("repository")
    return make_repository(folder, {"answerer": sources["answerer"]}) / "answerer" / "1"


@pytest.fixture(scope="module")
async def results(answerer: Path) -> list[QuestionAnsweringResult]:
    """Our results for all cases of the golden file, in its order."""
    inputs = [TaskInput(question_answering=_input(case)) for case in _GOLDEN["cases"]]
    return [result.question_answering for result in await infer_all(answerer, inputs)]


def test_golden_answers_are_those_of_the_model_that_the_tests_make(sources: dict[str, Path]) -> None:
    assert weights_digest(sources["answerer"]) == _GOLDEN["weights_sha256"]


@pytest.mark.parametrize("context", _GOLDEN["contexts"])
def test_answers_equal_those_of_transformers(context: str, results: list[QuestionAnsweringResult]) -> None:
    compared = 0
    for case, result in zip(_GOLDEN["cases"], results, strict=True):
        if case["context"] == context:
            ours = [
                {"text": answer.text, "start": answer.start, "end": answer.end, "score": answer.score}
                for answer in result.answers
            ]
            assert ours == _expected(case), (case["question"], case["options"])
            compared += 1
    assert compared > 0


def test_special_tokens_written_in_the_texts_are_text(answerer: Path) -> None:
    bundle = read_bundle(answerer)
    input = QuestionAnsweringInput(question="[CLS]?", context="A [CLS].")

    encoded = question_answering.encode(input, JsonTokenizer(bundle.tokenizer_json()), bundle.spec)

    # [CLS] [ cl ##s ] ? [SEP] a [ cl ##s ] . [SEP]: the first stands for "no answer", all but a word of the context for
    # nothing.
    assert (encoded.sequences[0]["input_ids"] == 101).tolist() == [True] + [False] * 13
    assert encoded.annotations[0]["char_start"].tolist() == [0, -1, -1, -1, -1, -1, -1, 0, 2, 3, 3, 6, 7, -1]
    assert encoded.annotations[0]["char_end"].tolist() == [0, -1, -1, -1, -1, -1, -1, 1, 3, 6, 6, 7, 8, -1]


def _input(case: dict[str, Any]) -> QuestionAnsweringInput:
    options = case["options"]
    return QuestionAnsweringInput(
        question=case["question"],
        context=_GOLDEN["contexts"][case["context"]],
        top_k=options.get("top_k", 0),
        max_answer_tokens=options.get("max_answer_len", 0),
        window_stride_tokens=options.get("doc_stride", 0),
        allow_no_answer=options.get("handle_impossible_answer", False),
    )


def _expected(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The golden answers without the passages of probability zero that transformers fills a long list with."""
    return [
        {**answer, "score": pytest.approx(answer["score"], rel=_SCORE_TOLERANCE)}
        for answer in case["answers"]
        if answer["score"] > 0
    ]
