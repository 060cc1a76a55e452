"""A task is in the protos, in tasks/ and in the compiler, under one name."""

from typing import get_args

import pytest
from google.protobuf.descriptor import FieldDescriptor

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, ScoreFunction, TaskInput, TaskResult
from neuronpipe.api.v1.tensors_pb2 import DataType, Tensor, TensorSet
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.tensors import to_arrays, to_tensor_set
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.scores import ScoreFunctionName
from tests.unit.model_specs import model_spec

_INPUTS: list[FieldDescriptor] = list(TaskInput.DESCRIPTOR.fields)
_RESULTS: list[FieldDescriptor] = list(TaskResult.DESCRIPTOR.fields)


def test_every_input_has_a_result_of_the_same_name_and_number() -> None:
    assert {(field.name, field.number) for field in _INPUTS} == {(field.name, field.number) for field in _RESULTS}


def test_every_input_is_one_of_the_tasks_and_the_reverse() -> None:
    assert set(ANSWERED_TASKS) == {field.name for field in _INPUTS}


def test_every_task_can_be_compiled_and_the_reverse() -> None:
    assert set(SOURCE_TASKS) == set(TASKS)


def test_every_option_of_generation_is_declared_with_the_type_of_its_field() -> None:
    types = {
        FieldDescriptor.TYPE_BOOL: {"bool"},
        FieldDescriptor.TYPE_DOUBLE: {"float"},
        FieldDescriptor.TYPE_UINT32: {"int", "token", "tokens"},
        FieldDescriptor.TYPE_UINT64: {"int"},
        FieldDescriptor.TYPE_ENUM: {"words"},
        FieldDescriptor.TYPE_STRING: {"text", "json", "texts"},
        FieldDescriptor.TYPE_MESSAGE: {"sequences", "biases"},
    }
    fields = GenerationOptions.DESCRIPTOR.fields_by_name
    assert set(OPTIONS) == set(fields)
    wrong = [
        name
        for name, option in OPTIONS.items()
        if option.kind not in types[fields[name].type]
        or fields[name].is_repeated != (option.kind in ("texts", "tokens", "sequences", "biases"))
        or (fields[name].is_repeated and not option.max_items)
        or (option.kind in ("text", "json") and not option.max_size)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ANSWERED_TASKS)
def test_a_task_goes_by_the_name_that_it_says(name: str) -> None:
    assert ANSWERED_TASKS[name].name == name


@pytest.mark.parametrize("name", ANSWERED_TASKS)
def test_every_model_answers_what_no_graph_is_compiled_for(name: str) -> None:
    assert model_spec("fill_mask").answers(name) == (name == "fill_mask" or name not in TASKS)


@pytest.mark.parametrize("message", [TaskInput, TaskResult], ids=["TaskInput", "TaskResult"])
def test_an_input_holds_one_task_only(message: type[TaskInput] | type[TaskResult]) -> None:
    (oneof,) = message.DESCRIPTOR.oneofs
    assert [field.name for field in oneof.fields] == [field.name for field in message.DESCRIPTOR.fields]


@pytest.mark.parametrize("field", [*_INPUTS, *_RESULTS], ids=lambda field: field.full_name.rpartition("v1.")[2])
def test_messages_of_a_task_are_named_after_it(field: FieldDescriptor) -> None:
    kind = "Input" if field in _INPUTS else "Result"
    message = field.message_type
    assert message is not None
    assert message.name == "".join(word.capitalize() for word in field.name.split("_")) + kind


def test_a_requests_input_is_a_task_input() -> None:
    assert InferRequest.DESCRIPTOR.fields_by_name["input"].message_type is TaskInput.DESCRIPTOR


def test_every_score_function_of_the_api_is_one_that_models_have_and_the_reverse() -> None:
    offered = {name.removeprefix("SCORE_FUNCTION_").lower() for name in ScoreFunction.DESCRIPTOR.values_by_name} - {
        "unspecified"
    }
    assert offered == set(get_args(ScoreFunctionName))


@pytest.mark.parametrize(
    "data_type", [number for number in DataType.values() if number != DataType.DATA_TYPE_UNSPECIFIED]
)
def test_every_data_type_of_the_api_can_be_read_and_written(data_type: "DataType.ValueType") -> None:
    message = TensorSet(tensors=[Tensor(name="t", data_type=data_type, shape=[0])])
    assert to_tensor_set(to_arrays(message)) == message
