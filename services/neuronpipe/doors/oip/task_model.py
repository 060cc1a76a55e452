"""A task as a model of tensors, made of the task's messages (tasks.proto): texts, lists of texts and images are inputs
of BYTES, every other field is a parameter of the request, and each field of the result is an output.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.packed import pack_input
from neuronpipe.core.parsing import too_long
from neuronpipe.core.task_inputs import FIELDS, NEEDED
from neuronpipe.core.tensors import Array
from neuronpipe.doors.oip.tensors import BYTES, DTYPES, Parameter, RowInput, Tensor, TensorSpec, row_field, shown
from neuronpipe.doors.vectors import token_vectors, vector
from neuronpipe.gateway.inference import InferenceResult
from neuronpipe.tasks import TASKS

COUNT = "count"
# The parameter of a request for a text as it comes.
STREAM = "stream"
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# A text that is the same for all rows.
_PARAMETERS = frozenset(name for name, one in FIELDS.items() if one.kind == "text" and one.is_option)
# Outputs have one datatype, and token ids are the input of MODEL/raw; the others are messages.
_LEFT_OUT = frozenset({"type", "precision", "token_ids", "options", "messages", "chunks"})
# Of chats and of prompts as token ids, which are not taken.
_UNKNOWN = frozenset(
    {"tools", "template_arguments", "continue_final_message", "prompt_token_ids", "prompt_logprobs", "utf8"}
)
# Outputs of log probabilities, whose messages have fields of the same names as others, and the way to each.
_LOGPROBS = "logprobs"
_OF_LOGPROBS = {"logprobs": ("logprob",), "top_token_ids": ("top", "token_id"), "top_logprobs": ("top", "logprob")}
_DATATYPES = {
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_DOUBLE: "FP64",
    FieldDescriptor.TYPE_FLOAT: "FP32",
    FieldDescriptor.TYPE_UINT32: "UINT32",
    FieldDescriptor.TYPE_ENUM: "UINT32",
}
_MAX_UINT32, _MAX_UINT64 = (1 << 32) - 1, (1 << 64) - 1
# The first field of a result → the output of its vectors, which are bytes already, or nearly so.
_VECTOR, _TOKEN_VECTORS = "embedding", "vectors"
_VECTORS = {"embedding": _VECTOR, "data": _TOKEN_VECTORS}

# The fields that lead from a result to an output's elements.
_Path = tuple[str, ...]


class TaskModel:
    """The inputs, outputs and parameters of a model; `parameters`: what each may be, by its name.

    An output has an axis for each repeated field on its way. Rows that have fewer elements than others are filled up
    with zeros and empty strings; `count` says how many of the first axis are real.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        fields = _fields(TaskInput.DESCRIPTOR.fields_by_name[task])
        self._texts = [one for one in fields if one.type in _TEXTS and one.name not in _PARAMETERS]
        self._options = {one.name: one for one in fields if one not in self._texts and one.name not in _LEFT_OUT}
        nested = [one for field in fields if field.name == "options" for one in _fields(field)]
        self._nested = {one.name: one for one in nested if not one.is_repeated}
        self.parameters = {name: _described(one) for name, one in (self._options | self._nested).items()}
        if TASKS[task].generates:
            self.parameters[STREAM] = "a boolean, for ModelStreamInfer"
        self.inputs = [
            TensorSpec(one.name, BYTES, (-1,) if one.is_repeated else (1,), one.name not in NEEDED[task])
            for one in self._texts
        ]
        self._paths: dict[str, _Path] = {}
        result = TaskResult.DESCRIPTOR.fields_by_name[task]
        self._vectors = _VECTORS.get(_fields(result)[0].name)
        if self._vectors:
            dims = (-1, -1) if self._vectors == _TOKEN_VECTORS else (-1,)
            self.outputs = [TensorSpec(self._vectors, "FP32", dims)]
        else:
            leaves = list(_leaves(result, ()))
            self._paths = {name: path for name, _, path in leaves}
            self.outputs = [
                TensorSpec(name, _DATATYPES[leaf.type], (-1,) * _axes(leaf, path)) for name, leaf, path in leaves
            ]
        self._first = next((path[0] for path in self._paths.values() if len(path) > 1), "")
        if self._first or self._vectors == _TOKEN_VECTORS:
            self.outputs.append(TensorSpec(COUNT, "UINT32", (1,)))

    def read_rows(
        self, tensors: Mapping[str, Tensor], rows: int, parameters: Mapping[str, Parameter], max_input_bytes: int
    ) -> list[RowInput]:
        """An input of the pipeline for each row. `parameters` has known names only. `max_input_bytes`: of a text.

        Raises InvalidInput.
        """
        inputs = [TaskInput() for _ in range(rows)]
        for row, input in enumerate(inputs):
            message = getattr(input, self._task)
            message.SetInParent()
            for name, value in parameters.items():
                if name == STREAM:
                    if value:
                        raise InvalidInput(STREAM, "is for ModelStreamInfer")
                elif name in self._nested:
                    setattr(message.options, name, _read(self._nested[name], value))
                else:
                    setattr(message, name, _read(self._options[name], value))
            for field in self._texts:
                if tensor := tensors.get(field.name):
                    width = tensor.shape[1]
                    elements: Any = tensor.values[row * width : (row + 1) * width]
                    if field.type == FieldDescriptor.TYPE_STRING:
                        elements = _decoded(row_field(field.name, row, rows), elements, max_input_bytes)
                    if field.is_repeated:
                        getattr(message, field.name).extend(elements)
                    else:
                        setattr(message, field.name, elements[0])
        return [(pack_input(input), None) for input in inputs]

    def write(
        self,
        results: Sequence[InferenceResult],
        wanted: Sequence[TensorSpec],
        tensors: Mapping[str, Tensor],
        max_bytes: int,
    ) -> list[Tensor]:
        """The outputs that are wanted, from the results of all rows. `tensors`: the inputs. Raises InvalidInput for an
        output of more than `max_bytes`.
        """
        messages = [one.result.body for one in results]
        return [self._output(spec, messages, max_bytes) for spec in wanted]

    def _output(self, spec: TensorSpec, messages: list[Any], max_bytes: int) -> Tensor:
        if self._vectors == _VECTOR:
            vectors = np.stack([vector(one) for one in messages])
            return Tensor(spec.name, spec.datatype, vectors.shape, vectors)
        if self._vectors == _TOKEN_VECTORS:
            arrays = [np.atleast_2d(token_vectors(one)) for one in messages]
            return _padded(spec, arrays, max_bytes) if spec.name != COUNT else _counts([len(one) for one in arrays])
        if spec.name == COUNT:
            return _counts([len(getattr(one, self._first)) for one in messages])
        values = [_values(one, self._paths[spec.name]) for one in messages]
        shape = _shape(values, 1 + len(spec.dims))
        spec.check_size(shape, max_bytes)
        if spec.datatype == BYTES:
            texts = np.full(shape, "", object)
            _fill(texts, values)
            return Tensor(spec.name, spec.datatype, shape, texts.ravel().tolist())
        numbers = np.zeros(shape, DTYPES[spec.datatype])
        _fill(numbers, values)
        return Tensor(spec.name, spec.datatype, shape, numbers)


def _fields(field: FieldDescriptor) -> list[FieldDescriptor]:
    fields = field.message_type.fields if field.message_type else ()
    return [one for one in fields if one.name not in _UNKNOWN]


def _leaves(field: FieldDescriptor, path: _Path) -> Iterator[tuple[str, FieldDescriptor, _Path]]:
    """The outputs: the name, the field and the way to it."""
    for one in _fields(field):
        if one.name == _LOGPROBS:
            for name, way in _OF_LOGPROBS.items():
                yield name, _leaf(one, way), (*path, one.name, *way)
        elif one.message_type:
            yield from _leaves(one, (*path, one.name))
        else:
            yield one.name, one, (*path, one.name)


def _leaf(field: FieldDescriptor, way: _Path) -> FieldDescriptor:
    for name in way:
        (field,) = (one for one in _fields(field) if one.name == name)
    return field


def _axes(leaf: FieldDescriptor, path: _Path) -> int:
    """Every field on the way to a leaf is repeated; whether the leaf is, too, it says itself."""
    return len(path) - 1 + leaf.is_repeated


def _values(message: Any, path: _Path) -> Any:
    """The elements of a leaf, in as many lists within lists as it has axes."""
    value = getattr(message, path[0])
    return value if len(path) == 1 else [_values(one, path[1:]) for one in value]


def _shape(values: Sequence[Any], axes: int) -> tuple[int, ...]:
    """The smallest shape that holds lists of different lengths."""
    if axes == 1:
        return (len(values),)
    inner = [_shape(one, axes - 1) for one in values] or [(0,) * (axes - 1)]
    return len(values), *(max(sizes) for sizes in zip(*inner, strict=True))


def _fill(target: Array, values: Sequence[Any]) -> None:
    """Puts the elements into an array, of which the rest stays as it is."""
    if target.ndim == 1:
        target[: len(values)] = values
    else:
        for part, one in zip(target, values, strict=False):
            _fill(part, one)


def _padded(spec: TensorSpec, arrays: Sequence[Any], max_bytes: int) -> Tensor:
    shape = len(arrays), max(len(one) for one in arrays), arrays[0].shape[1]
    spec.check_size(shape, max_bytes)
    padded = np.zeros(shape, np.float32)
    for row, one in enumerate(arrays):
        padded[row, : len(one)] = one
    return Tensor(spec.name, spec.datatype, shape, padded)


def _counts(counts: list[int]) -> Tensor:
    return Tensor(COUNT, "UINT32", (len(counts), 1), np.array(counts, DTYPES["UINT32"])[:, None])


def _decoded(field: str, elements: list[bytes], max_bytes: int) -> list[str]:
    if any(len(one) > max_bytes for one in elements):
        raise too_long(field, max_bytes)
    try:
        return [one.decode() for one in elements]
    except UnicodeDecodeError:
        raise InvalidInput(field, "is not UTF-8") from None


def _words(kind: EnumDescriptor) -> dict[str, int]:
    """The short names of an enumeration's values: that of TRUNCATION_RIGHT is right."""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {one.name.removeprefix(prefix).lower(): one.number for one in kind.values if one.number}


def _described(field: FieldDescriptor) -> str:
    if field.enum_type:
        return " or ".join(_words(field.enum_type))
    words = {"TYPE_BOOL": "a boolean", "TYPE_STRING": "a text", "TYPE_DOUBLE": "a number"}
    return {getattr(FieldDescriptor, name): word for name, word in words.items()}.get(field.type, "a whole number")


def _read(field: FieldDescriptor, value: Parameter) -> Parameter:
    """A parameter as its field takes it. Raises InvalidInput."""
    if field.enum_type:
        words = _words(field.enum_type)
        if (word := str(value).lower()) in words:  # a boolean is the word true or false
            return words[word]
    elif field.type == FieldDescriptor.TYPE_BOOL:
        if isinstance(value, bool):
            return value
    elif field.type == FieldDescriptor.TYPE_STRING:
        if isinstance(value, str):
            return value
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        if isinstance(value, float | int) and not isinstance(value, bool):
            return float(value)
    elif field.type == FieldDescriptor.TYPE_UINT64:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_UINT64:
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_UINT32:
        return value
    raise InvalidInput(field.name, f"{shown(value)}, must be {_described(field)}")
