"""The columns of a task's results in a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from neuronpipe.api.v1.tasks_pb2 import FeaturePooling, TaskResult
from neuronpipe.bulk.transform.formats import ColumnKind
from neuronpipe.client.task_call import to_array
from neuronpipe.core.errors import SetupError
from neuronpipe.doors.vectors import vector
from neuronpipe.tasks import ANSWERED_TASKS

_KINDS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_DOUBLE: "float64",
    FieldDescriptor.TYPE_FLOAT: "float32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_BOOL: "bool_",
}


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a task whose results do not have a column for each field.

    - `vectors`: the column of the result's vectors, for a result with vectors as bytes.
    - `elements`: the list of the result whose only element fills the columns if `has_one`.
    - `has_one(part)`: whether the result has one vector, or one element.
    - `renamed`: fields of the element whose columns have another name.
    """

    vectors: str = ""
    elements: str = ""
    has_one: Callable[[Any], bool] = lambda part: False
    renamed: Mapping[str, str] = field(default_factory=dict)


_UNPOOLED = FeaturePooling.FEATURE_POOLING_NONE
_COLUMNS: Mapping[str, _Columns] = {
    "feature_extraction": _Columns("features", has_one=lambda part: part.pooling > _UNPOOLED),
    "multi_vector_embedding": _Columns("vectors"),
    "question_answering": _Columns("", "answers", lambda part: part.top_k <= 1, {"text": "answer"}),
    # Without top_k, a text has one label, and an image several.
    "text_classification": _Columns("", "labels", lambda part: part.top_k <= 1),
    "image_classification": _Columns("", "labels", lambda part: part.top_k == 1),
}


def result_columns(task: str, part: Any) -> tuple[Callable[[TaskResult], Mapping[str, Any]], dict[str, ColumnKind]]:
    """Returns a function that reads the columns of a result, and their kinds. `part`: the fields that inputs share.

    Raises SetupError for a task without columns.
    """
    columns = _COLUMNS.get(task, _Columns())
    if ANSWERED_TASKS[task].generates:
        raise SetupError(f"--task {task.replace('_', '-')}: generated texts are not transformed; submit them as a job")
    message: Any = TaskResult.DESCRIPTOR.fields_by_name[task].message_type
    if message.fields[0].name == "embedding":
        return lambda result: {"embedding": vector(getattr(result, task))}, {"embedding": ["float32"]}
    if columns.vectors:

        def vectors(result: TaskResult) -> Mapping[str, Any]:
            array = to_array(getattr(result, task))
            return {columns.vectors: array if array.ndim == 1 else list(array)}

        return vectors, {columns.vectors: ["float32"] if columns.has_one(part) else [["float32"]]}
    if columns.elements and columns.has_one(part):
        names = columns.renamed
        kinds = _struct(message.fields_by_name[columns.elements].message_type)

        def first(result: TaskResult) -> Mapping[str, Any]:
            elements = getattr(getattr(result, task), columns.elements)
            return {names.get(name, name): value for name, value in _plain(elements[0]).items()} if elements else {}

        return first, {names.get(name, name): kind for name, kind in kinds.items()}
    return lambda result: _plain(getattr(result, task)), _struct(message)


def _struct(message: Any) -> dict[str, ColumnKind]:
    return {field.name: _field_kind(field) for field in message.fields}


def _field_kind(field: Any) -> ColumnKind:
    kind: ColumnKind = _struct(field.message_type) if field.message_type else _KINDS[field.type]
    return [kind] if field.is_repeated else kind


def _plain(message: Message) -> dict[str, Any]:
    """Returns a message as in JSON, with every field."""
    return {field.name: _plain_value(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _plain_value(value: Any, field: Any) -> Any:
    if field.message_type:
        return [_plain(part) for part in value] if field.is_repeated else _plain(value)
    return list(value) if field.is_repeated else value
