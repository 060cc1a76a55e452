"""inputs.py: the request that each task takes."""

from itertools import islice

import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.generation import GenerationLoad
from neuronpipe.measure.load.inputs import generation_requests, make_requests
from neuronpipe.measure.load.lengths import Lengths
from neuronpipe.measure.load.prompts import Words
from neuronpipe.measure.load.request import LoadRequest
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


def _prompts(load: GenerationLoad, words: Words | None) -> list[InferRequest]:
    return list(
        islice(generation_requests(_REQUEST, load, "text_generation", ["A text.", "Another."], words, (0, 0)), 3)
    )


def test_texts_are_prompts_again_and_again_where_no_length_is_given() -> None:
    made = [one.input.text_generation for one in _prompts(GenerationLoad(), None)]
    assert [one.prompt for one in made] == ["A text.", "Another.", "A text."]
    assert {(one.options.max_new_tokens, one.options.min_new_tokens, one.options.num_beams) for one in made} == {
        (32, 32, 1)
    }


def test_prompts_of_a_length_share_what_they_shall_share() -> None:
    words = Words([f"word{number}" for number in range(1000)], [1] * 1000)
    load = GenerationLoad(prompt_tokens=Lengths.fixed(20), shared_prefix_tokens=10)
    made = [one.input.text_generation.prompt.split() for one in _prompts(load, words)]
    assert [len(one) for one in made] == [30] * 3
    assert made[0][:10] == made[1][:10] == made[2][:10]
    assert len({tuple(one[10:]) for one in made}) == 3


@pytest.mark.parametrize("task", ["summarization", "translation"])
def test_the_text_is_what_is_summarized_or_translated(task: str) -> None:
    made = next(generation_requests(_REQUEST, GenerationLoad(num_beams=4), task, ["A text."], None, (0,)))
    input = getattr(made.input, task)
    assert (input.text, input.options.num_beams) == ("A text.", 4)


def test_a_task_that_does_not_generate_is_named() -> None:
    with pytest.raises(SetupError, match="--generate: model m has the task rerank; it is for text_generation, "):
        generation_requests(_REQUEST, GenerationLoad(), "rerank", ["a"], None, (0,))
