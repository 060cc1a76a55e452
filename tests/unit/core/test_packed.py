"""core/packed.py: values as messages and as bytes, each made of the other when it is asked for."""

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import QuestionAnsweringInput, RerankInput, TaskInput, TextClassificationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.packed import Packed, TensorSets, pack_body, pack_input
from neuronpipe.core.tensors import to_tensor_set

_INPUT = TaskInput(text_classification=TextClassificationInput(text="so"))


def _packed(data: bytes) -> Packed[TaskInput]:
    return Packed(TaskInput, data=data)


def test_bytes_and_message_are_the_same_value() -> None:
    assert pack_input(_INPUT).data == _INPUT.SerializeToString()
    assert _packed(_INPUT.SerializeToString()).message == _INPUT


def test_bytes_that_are_only_forwarded_are_not_parsed() -> None:
    broken = _packed(b"\x0a\x02\xff\xff")  # a text classification that holds no message
    assert (broken.data, broken.size_bytes, broken.task) == (b"\x0a\x02\xff\xff", 4, "text_classification")


@pytest.mark.parametrize(
    "data", [b"\x0a\x05abc", b"\xff" * 20, b"\x0a\x04\x0a\x02\xff\xfe"], ids=["cut", "no tag", "no UTF-8"]
)
def test_bytes_that_are_no_message_are_the_callers_fault(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^input: is no valid neuronpipe\.api\.v1\.TaskInput"):
        _ = _packed(data).message


@pytest.mark.parametrize(
    ("parts", "task"),
    [
        ([], None),
        ([TaskInput(rerank=RerankInput(query="q"))], "rerank"),
        ([TaskInput(rerank=RerankInput())], "rerank"),
        # Of several the last one counts, as protobuf has it.
        ([TaskInput(rerank=RerankInput(query="q")), _INPUT], "text_classification"),
        ([_INPUT, TaskInput(question_answering=QuestionAnsweringInput(context="x" * 1000))], "question_answering"),
    ],
)
def test_the_task_of_bytes_is_that_of_the_message(parts: list[TaskInput], task: str | None) -> None:
    data = b"".join(part.SerializeToString() for part in parts)
    assert _packed(data).task == task
    assert TaskInput.FromString(data).WhichOneof("task") == task


def test_a_field_that_only_newer_releases_know_is_no_task() -> None:
    assert _packed(b"\xa2\x06\x02hi").task is None  # field 100, of two bytes


def test_every_task_is_known_by_its_bytes() -> None:
    for field in TaskInput.DESCRIPTOR.oneofs_by_name["task"].fields:
        message = TaskInput()
        getattr(message, field.name).SetInParent()
        assert _packed(message.SerializeToString()).task == field.name


def test_tensors_are_the_same_as_arrays_and_as_bytes() -> None:
    arrays = [{"input_ids": np.array([1, 2], np.int32)}, {"input_ids": np.array([3], np.int32)}]
    data = [to_tensor_set(array).SerializeToString() for array in arrays]
    assert list(TensorSets(arrays=arrays).data) == data
    read = TensorSets(data=data).arrays
    assert [sequence["input_ids"].tolist() for sequence in read] == [[1, 2], [3]]
    assert len(TensorSets(data=data)) == len(TensorSets(arrays=arrays)) == 2


def test_tensors_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidInput, match="tensors: are no valid"):
        _ = TensorSets(data=[b"\x0a\x05abc"]).arrays


def test_the_message_of_the_task_is_the_body_and_an_input_of_no_task_has_none() -> None:
    assert _packed(_INPUT.SerializeToString()).body == _INPUT.text_classification
    assert pack_body(TaskInput, "text_classification", _INPUT.text_classification).message == _INPUT
    with pytest.raises(InvalidInput, match=r"^input: holds no task$"):
        _ = pack_input(TaskInput()).body
