"""The results on docs/tasks.md fit the inputs beside them."""

from typing import Any

import pytest

from neuronpipe.core.task_inputs import SAMPLES
from tests.reference.answers import answer_json, result_of

_PARTS_OF = {"question_answering": "context", "token_classification": "text", "zero_shot_token_classification": "text"}


@pytest.mark.parametrize("task", SAMPLES)
def test_each_sample_has_a_result_of_its_task(task: str) -> None:
    result = result_of(task)
    assert result.WhichOneof("task") == task
    assert getattr(result, task).ListFields()


def test_a_task_without_a_result_is_told_where_to_add_one() -> None:
    with pytest.raises(ValueError, match=r"answers\.py: no result for the sample of new_task; add it to _results\(\)"):
        result_of("new_task")


@pytest.mark.parametrize(("task", "field"), _PARTS_OF.items())
def test_parts_of_a_text_are_where_the_result_says(task: str, field: str) -> None:
    text: Any = SAMPLES[task][field]
    result = getattr(result_of(task), task)
    parts = [*getattr(result, "answers", ()), *getattr(result, "entities", ())]
    assert parts
    assert [part.text for part in parts] == [text[part.start : part.end] for part in parts]


@pytest.mark.parametrize("task", [task for task in SAMPLES if "candidate_labels" in SAMPLES[task]])
def test_labels_are_those_of_the_request(task: str) -> None:
    candidates: Any = SAMPLES[task]["candidate_labels"]
    result = getattr(result_of(task), task)
    labels = {entry.label for entry in (*getattr(result, "labels", ()), *getattr(result, "entities", ()))}
    assert labels
    assert labels <= set(candidates)


def test_scores_are_as_many_as_the_texts() -> None:
    texts: Any = SAMPLES["sentence_similarity"]["texts"]
    assert len(result_of("sentence_similarity").sentence_similarity.scores) == len(texts)
    assert answer_json("sentence_similarity") == "[0.04,0.63,0.02,0.48]"
