"""bulk/transform/rows.py: columns to a task's input, results to columns."""

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureType,
    MultiVectorEmbeddingInput,
    MultiVectorEmbeddingResult,
    QuestionAnsweringInput,
    SentenceEmbeddingInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    Truncation,
    ZeroShotClassificationInput,
)
from neuronpipe.bulk.transform.formats import Column
from neuronpipe.bulk.transform.request import InputAnswer
from neuronpipe.bulk.transform.rows import OpenAiRows, TaskRows
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.tasks import ANSWERED_TASKS
from tests.unit.task_messages import task_result

_LABELS = task_result(
    text_classification={"labels": [{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.25}]}
)


def _rows(fields: Mapping[str, str], *, cells_are_texts: bool = False, prefix: str = "", **task: Any) -> TaskRows:
    ((name, input),) = task.items()
    template = TaskInput(**{name: input})
    getattr(template, name).SetInParent()
    return TaskRows(name, template, fields, [Column("id")], prefix, cells_are_texts=cells_are_texts)


def _classifier(**options: Any) -> TaskRows:
    return _rows({"text": "review"}, text_classification=TextClassificationInput(**options))


def test_an_input_has_what_rows_share_and_what_columns_hold() -> None:
    rows = _rows(
        {"text": "body", "candidate_labels": "topics"},
        zero_shot_classification=ZeroShotClassificationInput(multi_label=True),
    )
    (input,) = rows.inputs({"body": "A text.", "topics": ["a", "b"], "other": 1})
    expected = ZeroShotClassificationInput(text="A text.", candidate_labels=["a", "b"], multi_label=True)
    assert input == TaskInput(zero_shot_classification=expected)


@pytest.mark.parametrize("task", ["text_generation", "summarization", "translation"])
def test_a_task_that_generates_is_refused_by_its_name(task: str) -> None:
    input: dict[str, Any] = {task: {}}
    with pytest.raises(SetupError, match=f"--task {task.replace('_', '-')}: generated texts are not transformed"):
        _rows({}, **input)


def test_each_task_has_columns_or_a_reason_why_not() -> None:
    for name in sorted(field.name for field in TaskInput.DESCRIPTOR.fields):
        input: dict[str, Any] = {name: {}}
        if not ANSWERED_TASKS[name].generates:
            assert _rows({}, **input).columns[-1].name == "error_reason"


def test_vectors_of_tokens_are_lists_of_numbers() -> None:
    rows = _rows({"text": "body"}, multi_vector_embedding=MultiVectorEmbeddingInput())
    data = np.array([[1, 2], [3, 4], [5, 6]], "<f4").tobytes()
    result = MultiVectorEmbeddingResult(data=data, shape=[3, 2], type=FeatureType.FEATURE_TYPE_FLOAT32)
    found = rows.record({"id": 1}, [InputAnswer(TaskResult(multi_vector_embedding=result), 3, 0, 4)])
    assert [vector.tolist() for vector in found["vectors"]] == [[1, 2], [3, 4], [5, 6]]


def test_cells_of_csv_hold_lists_as_json() -> None:
    asked = ZeroShotClassificationInput()
    rows = _rows({"text": "body", "candidate_labels": "topics"}, cells_are_texts=True, zero_shot_classification=asked)
    (input,) = rows.inputs({"body": "7", "topics": '["a"]'})
    assert input.zero_shot_classification == ZeroShotClassificationInput(text="7", candidate_labels=["a"])
    for cell in ("a, b", "[" * 100_000):
        with pytest.raises(InvalidInput, match="column 'topics': is no valid JSON"):
            rows.inputs({"body": "7", "topics": cell})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("is no valid JSON", "row: is no valid JSON"),
        ({"text": "x"}, "column 'review': is missing"),
        ({"review": None}, "column 'review': is missing"),
        ({"review": 7}, "column 'review': must be a text"),
        ({"review": ["x"]}, "column 'review': must be a text"),
        ({"review": "\ud800"}, "column 'review': is no valid Unicode"),
        ({"review": pyarrow.array([b"\xff"]).view("string")[0]}, "column 'review': is not UTF-8"),
    ],
)
def test_a_row_of_which_no_input_can_be_made_says_why(row: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _classifier().inputs(row)


def test_the_best_label_has_columns_of_its_own_and_several_are_a_list() -> None:
    row, answer = {"id": 5, "review": "x"}, InputAnswer(_LABELS, 3, 0, 4)
    expected = {"id": 5, "label": "good", "score": 0.75, "error": None, "error_reason": None}
    assert _classifier().record(row, [answer]) == expected
    several = _classifier(top_k=2).record(row, [answer])
    assert several["labels"] == [{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.25}]


def test_a_row_that_failed_has_its_error_and_what_it_keeps() -> None:
    rows = _rows({"text": "review"}, prefix="p_", text_classification=TextClassificationInput())
    found = rows.record({"id": 5}, [InvalidInput("text", "is empty")])
    failed = {"p_error": "text: is empty", "p_error_reason": "INVALID_INPUT"}
    assert found == {"id": 5, "p_label": None, "p_score": None, **failed}
    assert [column.name for column in rows.columns] == list(found)


def test_truncation_is_not_silent() -> None:
    rows = _classifier(truncation=Truncation.TRUNCATION_RIGHT)
    assert rows.record({}, [InputAnswer(_LABELS, 3, 17, 4)])["truncated_tokens"] == 17


def test_a_vector_is_an_array_of_float32() -> None:
    rows = _rows({"text": "text"}, sentence_embedding=SentenceEmbeddingInput())
    result = task_result(sentence_embedding={"embedding": [0.1, 0.2]})
    found = rows.record({}, [InputAnswer(result, 3, 0, 4)])["embedding"]
    np.testing.assert_array_equal(found, np.array([0.1, 0.2], np.float32))


def test_an_answer_of_no_passage_has_empty_columns() -> None:
    rows = _rows({"question": "q", "context": "c"}, question_answering=QuestionAnsweringInput())
    none = task_result(question_answering={})
    assert rows.record({}, [InputAnswer(none, 3, 0, 4)])["answer"] is None
    answered = task_result(question_answering={"answers": [{"text": "a", "score": 1, "start": 2, "end": 3}]})
    found = rows.record({}, [InputAnswer(answered, 3, 0, 4)])
    assert (found["answer"], found["score"], found["start"], found["end"]) == ("a", 1.0, 2, 3)


def test_rows_travel_to_other_processes() -> None:
    rows = _classifier(top_k=2)
    copied = pickle.loads(pickle.dumps(rows))
    assert copied.columns == rows.columns
    assert copied.inputs({"review": "x"}) == rows.inputs({"review": "x"})


def _openai(**changes: Any) -> dict[str, Any]:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": ["x", "y"]}}
    return row | changes


def test_openai_s_batch_files_are_answered_in_their_words() -> None:
    rows = OpenAiRows("m")
    assert [input.sentence_embedding.text for input in rows.inputs(_openai())] == ["x", "y"]
    vectors = [task_result(sentence_embedding={"embedding": [number]}) for number in (1, 2)]
    record = rows.record(_openai(), [InputAnswer(vector, 3, 0, 4) for vector in vectors])
    response = record["response"]
    assert (record["custom_id"], record["error"], response["status_code"]) == ("a", None, 200)
    assert [(row["index"], row["embedding"].tolist()) for row in response["body"]["data"]] == [(0, [1.0]), (1, [2.0])]
    assert response["body"]["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


def test_openai_s_batch_files_choose_prompts_by_the_words_of_every_client() -> None:
    rows = OpenAiRows("m", ["query"])
    row = _openai(body={"model": "m", "input": "x", "input_type": "search_query"})
    assert [input.sentence_embedding.prompt_name for input in rows.inputs(row)] == ["query"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (_openai(custom_id=None), "custom_id"),
        (_openai(url="/v1/chat/completions"), "url"),
        (_openai(body={"model": "other", "input": "x"}), "body.model"),
        (_openai(body={"model": "m"}), "input"),
        (_openai(body={"model": "m", "input": []}), "input"),
        (_openai(body={"model": "m", "input": "x", "instruction": "Find."}), "instruction: is not supported"),
        (_openai(body={"model": "m", "input": "x", "input_type": "query"}), "input_type: is none of"),
        (_openai(body={"model": "m", "input": "x", "embedding_type": ["float"]}), "embedding_type: must be one"),
        (_openai(body={"model": "m", "input": ["x", "\ud800"]}), "body.input: is no valid Unicode"),
        ("is no valid JSON", "row"),
    ],
)
def test_a_request_of_openai_s_that_is_wrong_gets_its_error(row: Any, message: str) -> None:
    rows = OpenAiRows("m")
    with pytest.raises(InvalidInput, match=message) as raised:
        rows.inputs(row)
    response = rows.record(row, [raised.value])["response"]
    assert response["status_code"] == 400
    assert response["body"]["error"]["type"] == "invalid_request_error"
