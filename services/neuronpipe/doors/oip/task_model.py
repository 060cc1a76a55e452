"""A task as a model of tensors, made of the task's messages (tasks.proto).

Texts, lists of texts and images are inputs of BYTES. Every other field of an input is a parameter of the request, and
each field of the result is an output.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.packed import pack_input
from neuronpipe.core.parsing import too_many_bytes
from neuronpipe.core.task_inputs import FIELDS, NEEDED
from neuronpipe.core.tensors import Array
from neuronpipe.doors.oip.tensors import (
    BYTES,
    DTYPES,
    NamedTensor,
    Parameter,
    RowInput,
    TensorSpec,
    padded,
    row_field,
    shown,
)
from neuronpipe.doors.vectors import token_vectors, vector
from neuronpipe.gateway.requests import InferenceResult
from neuronpipe.tasks import TASKS

COUNT = "count"
# The parameter of a request for a text as it comes.
STREAM = "stream"
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# Texts that are the same for all rows.
_PARAMETERS = frozenset(name for name, field in FIELDS.items() if field.kind == "text" and field.is_option)
# Fields of a task's input without a tensor or parameter.
_LEFT_OUT: Mapping[str, Sequence[str]] = {
    "feature_extraction": ("type",),
    "image_embedding": ("precision",),
    "multi_vector_embedding": ("type",),
    "sentence_embedding": ("precision", "token_ids", "texts", "return_sparse", "return_multi_vector"),
    "text_generation": ("prompt_token_ids", "tools", "template_arguments", "continue_final_message"),
}
# Fields of options and results that are not supported.
_UNKNOWN = frozenset({"prompt_logprobs", "utf8"})
# Outputs of log probabilities → the way to each. Their messages share names of fields with other messages.
_LOGPROBS = "logprobs"
_OF_LOGPROBS = {"logprobs": ("logprob",), "top_token_ids": ("top", "token_id"), "top_logprobs": ("top", "logprob")}
_DATATYPES = {
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_DOUBLE: "FP64",
    FieldDescriptor.TYPE_FLOAT: "FP32",
    FieldDescriptor.TYPE_UINT32: "UINT32",
    FieldDescriptor.TYPE_ENUM: "UINT32",
}
# The type of a field → the words for a parameter's values, their types in Python, and the largest whole number.
_WHOLE: tuple[str, Any, int | None] = ("a whole number", int, (1 << 32) - 1)
_KINDS: Mapping[int, tuple[str, Any, int | None]] = {
    FieldDescriptor.TYPE_BOOL: ("a boolean", bool, None),
    FieldDescriptor.TYPE_STRING: ("a text", str, None),
    FieldDescriptor.TYPE_DOUBLE: ("a number", float | int, None),
    FieldDescriptor.TYPE_UINT64: ("a whole number", int, (1 << 64) - 1),
}
# The first field of a result with vectors → the name of the output. The vectors are copied as bytes.
_VECTOR, _TOKEN_VECTORS = "embedding", "vectors"
_VECTORS = {"embedding": _VECTOR, "data": _TOKEN_VECTORS}

# The fields that lead from a result to an output's elements.
_Path = tuple[str, ...]


class TaskModel:
    """The inputs, outputs and parameters of a model. `parameters`: the values that each parameter may have, by name.

    An output has an axis for each repeated field on its way. Zeros and empty strings fill rows that have fewer elements
    than others. The output `count` has the number of real elements on the first axis.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        input, left_out = TaskInput.DESCRIPTOR.fields_by_name[task], _LEFT_OUT.get(task, ())
        fields = [field for field in _fields(input) if field.name not in left_out]
        self._texts = [field for field in fields if field.type in _TEXTS and field.name not in _PARAMETERS]
        self._options = {field.name: field for field in fields if field not in self._texts and not field.message_type}
        options = next((_fields(field) for field in fields if field.name == "options"), [])
        self._nested = {field.name: field for field in options if not field.is_repeated}
        self.parameters = {name: _described(field) for name, field in (self._options | self._nested).items()}
        if TASKS[task].generates:
            self.parameters[STREAM] = "a boolean, for ModelStreamInfer"
        self.inputs = [
            TensorSpec(field.name, BYTES, (-1,) if field.is_repeated else (1,), field.name not in NEEDED[task])
            for field in self._texts
        ]
        self._paths: dict[str, _Path] = {}
        self.outputs: list[TensorSpec] = []
        result = TaskResult.DESCRIPTOR.fields_by_name[task]
        self._vectors = _VECTORS.get(_fields(result)[0].name)
        if self._vectors:
            dims = (-1, -1) if self._vectors == _TOKEN_VECTORS else (-1,)
            self.outputs = [TensorSpec(self._vectors, "FP32", dims)]
        else:
            for name, leaf, path in _leaves(result, ()):
                axes = len(path) - 1 + leaf.is_repeated  # every field on the way to a leaf is repeated
                self._paths[name] = path
                self.outputs.append(TensorSpec(name, _DATATYPES[leaf.type], (-1,) * axes))
        self._first = next((path[0] for path in self._paths.values() if len(path) > 1), "")
        if self._first or self._vectors == _TOKEN_VECTORS:
            self.outputs.append(TensorSpec(COUNT, "UINT32", (1,)))

    def read_rows(
        self, tensors: Mapping[str, NamedTensor], rows: int, parameters: Mapping[str, Parameter], max_input_bytes: int
    ) -> list[RowInput]:
        """Returns an input of the pipeline for each row. `parameters`: values with known names only.

        Raises InvalidInput, also for a text of more than `max_input_bytes`.
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
        tensors: Mapping[str, NamedTensor],
        max_bytes: int,
    ) -> list[NamedTensor]:
        """Returns the wanted outputs of the results of all rows. `tensors`: the inputs.

        Raises InvalidInput if an output has more than `max_bytes`.
        """
        messages = [result.result.body for result in results]
        return [self._output(spec, messages, max_bytes) for spec in wanted]

    def _output(self, spec: TensorSpec, messages: list[Any], max_bytes: int) -> NamedTensor:
        if self._vectors == _VECTOR:
            vectors = np.stack([vector(message) for message in messages])
            return NamedTensor(spec.name, spec.datatype, vectors.shape, vectors)
        if self._vectors == _TOKEN_VECTORS:
            arrays = [np.atleast_2d(token_vectors(message)) for message in messages]
            if spec.name == COUNT:
                return _counts(list(map(len, arrays)))
            shape: tuple[int, ...] = len(arrays), max(map(len, arrays)), arrays[0].shape[1]
            spec.check_size(shape, max_bytes)
            return padded(spec, shape, arrays)
        if spec.name == COUNT:
            return _counts([len(getattr(message, self._first)) for message in messages])
        values = [_values(message, self._paths[spec.name]) for message in messages]
        shape = _shape(values, 1 + len(spec.dims))
        spec.check_size(shape, max_bytes)
        if spec.datatype == BYTES:
            texts = np.full(shape, "", object)
            _fill(texts, values)
            return NamedTensor(spec.name, spec.datatype, shape, texts.ravel().tolist())
        numbers = np.zeros(shape, DTYPES[spec.datatype])
        _fill(numbers, values)
        return NamedTensor(spec.name, spec.datatype, shape, numbers)


def _fields(field: FieldDescriptor) -> list[FieldDescriptor]:
    fields = field.message_type.fields if field.message_type else ()
    return [inner for inner in fields if inner.name not in _UNKNOWN]


def _leaves(field: FieldDescriptor, path: _Path) -> Iterator[tuple[str, FieldDescriptor, _Path]]:
    """Yields the outputs below a field: the name, the field and the way to it."""
    for inner in _fields(field):
        if inner.name == _LOGPROBS:
            for name, way in _OF_LOGPROBS.items():
                leaf = inner
                for step in way:
                    (leaf,) = (part for part in _fields(leaf) if part.name == step)
                yield name, leaf, (*path, inner.name, *way)
        elif inner.message_type:
            yield from _leaves(inner, (*path, inner.name))
        else:
            yield inner.name, inner, (*path, inner.name)


def _values(message: Any, path: _Path) -> Any:
    """Returns the elements of a leaf, in lists within lists, with a level for each axis."""
    value = getattr(message, path[0])
    return value if len(path) == 1 else [_values(inner, path[1:]) for inner in value]


def _shape(values: Sequence[Any], axes: int) -> tuple[int, ...]:
    """Returns the smallest shape that holds lists of different lengths."""
    if axes == 1:
        return (len(values),)
    shapes = [_shape(inner, axes - 1) for inner in values] or [(0,) * (axes - 1)]
    return len(values), *map(max, zip(*shapes, strict=True))


def _fill(target: Array, values: Sequence[Any]) -> None:
    """Puts the elements at the beginning of an array, whose other elements do not change."""
    if target.ndim == 1:
        target[: len(values)] = values
    else:
        for part, inner in zip(target, values, strict=False):
            _fill(part, inner)


def _counts(counts: list[int]) -> NamedTensor:
    return NamedTensor(COUNT, "UINT32", (len(counts), 1), np.array(counts, DTYPES["UINT32"])[:, None])


def _decoded(field: str, elements: list[bytes], max_bytes: int) -> list[str]:
    if any(len(element) > max_bytes for element in elements):
        raise too_many_bytes(field, max_bytes)
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidInput(field, "is not UTF-8") from None


def _words(kind: EnumDescriptor) -> dict[str, int]:
    """Returns the short names of an enumeration's values, such as right for TRUNCATION_RIGHT, with their numbers."""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix).lower(): value.number for value in kind.values if value.number}


def _described(field: FieldDescriptor) -> str:
    """Returns the values that a parameter may have, in words."""
    return " or ".join(_words(field.enum_type)) if field.enum_type else _KINDS.get(field.type, _WHOLE)[0]


def _read(field: FieldDescriptor, value: Parameter) -> Parameter:
    """Converts a parameter to the type of its field. Raises InvalidInput."""
    if field.enum_type:
        words = _words(field.enum_type)
        if (word := str(value).lower()) in words:  # a boolean is the word true or false
            return words[word]
    else:
        _, kinds, maximum = _KINDS.get(field.type, _WHOLE)
        is_kind = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if is_kind and (maximum is None or (isinstance(value, int) and 0 <= value <= maximum)):
            return float(value) if field.type == FieldDescriptor.TYPE_DOUBLE else value
    raise InvalidInput(field.name, f"{shown(value)}, must be {_described(field)}")
