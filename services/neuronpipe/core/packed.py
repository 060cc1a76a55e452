"""Values that are a protobuf message in one process and bytes in another.

Each form is made from the other when it is first needed. So a gateway that only forwards a value never parses it, and a
single process never serializes it.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.api.v1.tensors_pb2 import TensorSet
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Arrays, to_arrays, to_tensor_set

MessageT = TypeVar("MessageT", bound=Message)

_TASKS = {field.number: field.name for field in TaskInput.DESCRIPTOR.oneofs_by_name["task"].fields}
_LENGTH_DELIMITED = 2


class Packed(Generic[MessageT]):
    """A TaskInput or a TaskResult."""

    __slots__ = ("_data", "_kind", "_message", "_task")

    def __init__(self, kind: type[MessageT], *, data: bytes | None = None, message: MessageT | None = None) -> None:
        """Takes one of the two forms."""
        self._kind = kind
        self._data = data
        self._message = message
        self._task: str | None = None

    @property
    def data(self) -> bytes:
        """The serialized message."""
        if self._data is None:
            assert self._message is not None  # noqa: S101 (one of the two is there)
            self._data = self._message.SerializeToString()
        return self._data

    @property
    def message(self) -> MessageT:
        """The message. Raises InvalidInput for bytes that cannot be parsed."""
        if self._message is None:
            try:
                self._message = self._kind.FromString(self.data)
            except DecodeError as error:
                problem = f"is no valid {self._kind.DESCRIPTOR.full_name}: broken, or holds a string that is not UTF-8"
                raise InvalidInput("input", problem) from error
        return self._message

    @property
    def size_bytes(self) -> int:
        """The size of the serialized message."""
        return len(self.data)  # the message's ByteSize would serialize it, too, and keep nothing

    @property
    def task(self) -> str | None:
        """The task of the message; None if this release does not know it. Raises InvalidInput."""
        if self._task is None:
            self._task = (self._message is None and _only_task(self.data)) or self.message.WhichOneof("task")
        return self._task


def pack_input(message: TaskInput) -> Packed[TaskInput]:
    """Wraps an input that exists as a message."""
    return Packed(TaskInput, message=message)


def pack_result(message: TaskResult) -> Packed[TaskResult]:
    """Wraps a result that exists as a message."""
    return Packed(TaskResult, message=message)


class TensorSets:
    """The arrays of an input's sequences, one set for each. Arrays that are read from bytes are views on them."""

    __slots__ = ("_arrays", "_data")

    def __init__(self, *, arrays: Sequence[Arrays] | None = None, data: Sequence[bytes] | None = None) -> None:
        """Takes one of the two forms. `data` are serialized TensorSet messages."""
        self._arrays = arrays
        self._data = data

    def __len__(self) -> int:
        sets = self._arrays if self._arrays is not None else self._data
        return len(sets or ())

    @property
    def arrays(self) -> Sequence[Arrays]:
        """The named arrays of each sequence. Raises InvalidInput for bytes that cannot be parsed."""
        if self._arrays is None:
            try:
                self._arrays = [to_arrays(TensorSet.FromString(data)) for data in self._data or ()]
            except DecodeError as error:
                raise InvalidInput("tensors", "are no valid neuronpipe.api.v1.TensorSet") from error
        return self._arrays

    @property
    def data(self) -> Sequence[bytes]:
        """The serialized messages."""
        if self._data is None:
            self._data = [to_tensor_set(arrays).SerializeToString() for arrays in self._arrays or ()]
        return self._data

    @property
    def size_bytes(self) -> int:
        """The size of the serialized messages. For arrays it leaves out names and shapes."""
        if self._data is not None:
            return sum(map(len, self._data))
        return sum([array.nbytes for arrays in self._arrays or () for array in arrays.values()])


NO_TENSORS = TensorSets(arrays=())


def _only_task(data: bytes) -> str | None:
    """The task of a serialized message that holds a single field, as nearly all do; None if it has to be parsed."""
    number_and_type, position = _varint(data, 0)
    if number_and_type & 7 != _LENGTH_DELIMITED:
        return None
    length, position = _varint(data, position)
    return _TASKS.get(number_and_type >> 3) if position + length == len(data) else None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position and where it ends; 0 if the bytes end before it does.

    See https://protobuf.dev/programming-guides/encoding/.
    """
    number = shift = 0
    for byte in data[position : position + 10]:
        number |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if byte < 0x80:
            return number, position
    return 0, position
