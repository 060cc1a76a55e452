"""inputs.py: the request that each task takes."""

import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.core.errors import SetupError
from neuronpipe.load.inputs import make_requests
from neuronpipe.load.request import LoadRequest
from neuronpipe.tasks import TASKS

_REQUEST = LoadRequest(target="h:1", model="m", version="2")


@pytest.mark.parametrize("task", ["text_classification", "sentence_embedding"])
def test_a_text_is_truncated_on_the_right_where_it_is_too_long(task: str) -> None:
    (made,) = make_requests(_REQUEST, task, ["A text."])
    input = getattr(made.input, task)
    assert made.input.WhichOneof("task") == task
    assert (input.text, input.truncation) == ("A text.", Truncation.TRUNCATION_RIGHT)


def test_a_question_is_asked_of_the_text() -> None:
    (made,) = make_requests(_REQUEST, "question_answering", ["A text."])
    assert made.input.question_answering.context == "A text."
    assert made.input.question_answering.question


@pytest.mark.parametrize(("task", "field"), [("sentence_similarity", "texts"), ("rerank", "texts")])
def test_a_text_is_one_of_the_many_that_a_task_takes(task: str, field: str) -> None:
    (made,) = make_requests(_REQUEST, task, ["A text."])
    assert list(getattr(getattr(made.input, task), field)) == ["A text."]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_of_a_model_is_known(task: str) -> None:
    assert make_requests(_REQUEST, task, ["A text."])[0].input.WhichOneof("task") == task


def test_every_request_names_the_model_and_its_version() -> None:
    made = make_requests(_REQUEST, "sentence_embedding", ["a", "b"])
    assert [(one.model, one.version, one.input.sentence_embedding.text) for one in made] == [
        ("m", "2", "a"),
        ("m", "2", "b"),
    ]


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (None, Priority.PRIORITY_UNSPECIFIED),
        ("interactive", Priority.PRIORITY_INTERACTIVE),
        ("bulk", Priority.PRIORITY_BULK),
    ],
)
def test_priority_is_passed_on(priority: str | None, expected: "Priority.ValueType") -> None:
    made: InferRequest
    (made,) = make_requests(LoadRequest(target="h:1", model="m", priority=priority), "sentence_embedding", ["a"])
    assert made.priority == expected


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(SetupError, match="--model m: has the task speech; load is generated for text_classification, "):
        make_requests(_REQUEST, "speech", ["a"])
