"""The tensors of the Open Inference Protocol."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.packed import Packed
from neuronpipe.core.tensors import Array

BYTES = "BYTES"
# Maximum number of inputs, outputs, or parameters of one request: more than any model has, because each is read alone.
MAX_TENSORS = 64
# The datatypes of our inputs and outputs. The protocol is little-endian on every machine.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "UINT8": np.dtype("u1"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT32": np.dtype("<u4"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
# Maximum number of strings in one row: the limit of texts in a request for reranking.
_MAX_STRINGS = 1024
# Maximum number of elements of a tensor of strings, because each is read alone.
_MAX_ELEMENTS = 1 << 16
# Maximum number of tokens in one row, including padding, which costs memory while the row is in flight; no model takes
# more.
_MAX_TOKENS = 1 << 16
_LENGTH_BYTES = 4
# Memory of an empty or short string while it is written.
_STRING_BYTES = 64


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """An input or output. `values`: an array, or for BYTES a row-major list: bytes for an input, str for an output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Any

    def raw(self) -> bytes:
        """Returns the elements as bytes, little-endian; each element of BYTES follows its length."""
        if self.datatype != BYTES:
            data: bytes = self.values.tobytes()
            return data
        encoded = [element.encode() for element in self.values]
        return b"".join([part for data in encoded for part in (len(data).to_bytes(_LENGTH_BYTES, "little"), data)])


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """An input as a caller sent it: its elements as bytes, or as `values`, flat or in lists of lists."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | None = None
    values: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. `dims`: shape of a row, -1 for any size. `also`: further datatypes of an input."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    also: Sequence[str] = field(default=())

    def read(self, tensor: GivenTensor, max_rows: int) -> NamedTensor:
        """Checks an input and reads its elements. Raises InvalidInput, which names it."""
        if tensor.datatype not in (self.datatype, *self.also):
            raise InvalidInput(self.name, f"its datatype must be {' or '.join((self.datatype, *self.also))}")
        shape = tensor.shape
        if self.dims == (1,) and len(shape) == 1:
            shape = (*shape, 1)
        fits = len(shape) == 1 + len(self.dims) and all(
            size == dim or (dim == -1 and size >= 0) for size, dim in zip(shape[1:], self.dims, strict=True)
        )
        if not fits:
            raise InvalidInput(self.name, f"its shape must be [{', '.join(map(str, ('rows', *self.dims)))}]")
        if not 1 <= shape[0] <= max_rows:
            raise InvalidInput(self.name, f"{shape[0]} rows, must be 1 to {max_rows}")
        longest = _MAX_STRINGS if self.datatype == BYTES else _MAX_TOKENS
        if -1 in self.dims and shape[1] > longest:
            raise InvalidInput(self.name, f"{shape[1]} elements in a row, the limit is {longest}")
        read = self._read_bytes if self.datatype == BYTES else self._read_numbers
        return NamedTensor(self.name, tensor.datatype, shape, read(tensor, shape))

    def check_size(self, shape: tuple[int, ...], max_bytes: int) -> None:
        """Checks the size of an output before it is made, because padding makes all rows as long as the longest row.

        Raises InvalidInput.
        """
        item_bytes = _STRING_BYTES if self.datatype == BYTES else DTYPES[self.datatype].itemsize
        if (size_bytes := math.prod(shape) * item_bytes) > max_bytes:
            raise InvalidInput(
                self.name,
                f"about {size_bytes} bytes in the shape {list(shape)}, the limit is {max_bytes}; send fewer "
                "rows at once, or rows of like lengths",
            )

    def _read_bytes(self, tensor: GivenTensor, shape: tuple[int, ...]) -> list[bytes]:
        count = math.prod(shape)
        if count > _MAX_ELEMENTS:
            raise InvalidInput(self.name, f"{count} elements, the limit is {_MAX_ELEMENTS}; send fewer rows at once")
        if tensor.raw is None:
            elements = _flat(self.name, tensor.values, len(shape) - 1)
            self._check_count(len(elements), count, "elements")
            return [_bytes_of(self.name, element) for element in elements]
        data, elements, end = tensor.raw, [], 0
        for number in range(count):
            begin = end + _LENGTH_BYTES
            end = begin + int.from_bytes(data[end:begin], "little")
            if end > len(data) or begin > len(data):
                raise InvalidInput(self.name, f"its {len(data)} bytes end within element {number} of {count}")
            elements.append(data[begin:end])
        if end != len(data):
            raise InvalidInput(self.name, f"{len(data)} bytes, its {count} elements take {end}")
        return elements

    def _read_numbers(self, tensor: GivenTensor, shape: tuple[int, ...]) -> Array:
        dtype = DTYPES[tensor.datatype]
        if tensor.raw is not None:
            self._check_count(len(tensor.raw), math.prod(shape) * dtype.itemsize, "bytes")
            return np.frombuffer(tensor.raw, dtype).reshape(shape)
        values: Any = tensor.values
        if not isinstance(values, list):  # the values of a message are numbers
            self._check_count(len(values), math.prod(shape), "elements")
            values = np.fromiter(values, np.int64, len(values))
        try:
            array = np.array(values)
        except (ValueError, OverflowError):
            raise InvalidInput(self.name, "its lists have different lengths") from None
        self._check_count(array.size, math.prod(shape), "elements")
        if array.ndim > 1 and array.shape != tensor.shape:
            raise InvalidInput(self.name, f"its lists have the shape {list(array.shape)}, not that of the tensor")
        limits = np.iinfo(dtype)
        if array.size and (array.dtype.kind not in "iu" or array.min() < limits.min or array.max() > limits.max):
            raise InvalidInput(self.name, f"has elements that are not {tensor.datatype}")
        return array.astype(dtype).reshape(shape)

    def _check_count(self, count: int, expected: int, unit: str) -> None:
        if count != expected:
            raise InvalidInput(self.name, f"{count} {unit}, its shape takes {expected}")


def padded(spec: TensorSpec, shape: tuple[int, ...], rows: Sequence[Any]) -> NamedTensor:
    """Returns an output with rows of different lengths, which end in zeros."""
    values = np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        values[number, : len(row)] = row
    return NamedTensor(spec.name, spec.datatype, shape, values)


def _flat(name: str, values: Sequence[Any], depth: int) -> Sequence[Any]:
    for _ in range(depth):
        if not (values and isinstance(values[0], list)):
            break
        if not all(isinstance(value, list) for value in values):
            raise InvalidInput(name, "its lists have different depths")
        values = [inner for value in values for inner in value]
    return values


def _bytes_of(name: str, element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, bytes):
        return element
    raise InvalidInput(name, "has elements that are not strings")


# The value of a request's parameter.
Parameter = bool | int | float | str
# An input of the pipeline: the input of a task, or an input that a caller encoded.
RowInput = tuple[Packed[TaskInput], EncodedInput | None]


def row_field(name: str, row: int, rows: int) -> str:
    """Returns the name of a row's part of an input, for errors."""
    return f"{name}[{row}]" if rows > 1 else name


def shown(word: Any) -> str:
    """Returns a caller's word in the form in which an error repeats it."""
    text = f"{word!r}"
    return text if len(text) <= 66 else f"{text[:64]}…"
