"""Values that are a protobuf message in one process and bytes in another.

Each form is made from the other when it is first needed. So a gateway that only forwards a value never parses it, and a
single process never serializes it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TaskInput, TaskResult
from neuronpipe.api.v1.tensors_pb2 import TensorSet
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.parsing import varint
from neuronpipe.core.tensors import Arrays, to_arrays, to_tensor_set

MessageT = TypeVar("MessageT", bound=Message)

_TASKS = {field.number: field.name for field in TaskInput.DESCRIPTOR.oneofs_by_name["task"].fields}
_LENGTH_DELIMITED = 2


class Packed(Generic[MessageT]):
    """A TaskInput or a TaskResult."""

    __slots__ = ("_data", "_kind", "_message", "_task")

    def __init__(self, kind: type[MessageT], *, data: bytes | None = None, message: MessageT | None = None) -> None:
        self._kind = kind
        self._data = data
        self._message = message
        self._task: str | None = None

    @property
    def data(self) -> bytes:
        if self._data is None:
            assert self._message is not None  # noqa: S101 (one of the two is set)
            self._data = self._message.SerializeToString()
        return self._data

    @property
    def message(self) -> MessageT:
        """The message. Raises InvalidInput if the bytes cannot be parsed."""
        if self._message is None:
            try:
                self._message = self._kind.FromString(self.data)
            except DecodeError as error:
                problem = f"is no valid {self._kind.DESCRIPTOR.full_name}: broken, or holds a string that is not UTF-8"
                raise InvalidInput("input", problem) from error
        return self._message

    @property
    def size_bytes(self) -> int:
        return len(self.data)  # the message's ByteSize would also serialize it, and discard the bytes

    @property
    def task(self) -> str | None:
        """The task of the message; None if this release does not know the task. Raises InvalidInput."""
        if self._task is None:
            self._task = (self._message is None and _only_task(self.data)) or self.message.WhichOneof("task")
        return self._task

    @property
    def body(self) -> Any:
        """The message of the task, such as a TextGenerationInput. Raises InvalidInput, also where there is no task."""
        task = self.task
        if task is None:
            raise InvalidInput("input", "holds no task")
        return getattr(self.message, task)


def pack_body(kind: type[MessageT], task: str, body: Message) -> Packed[MessageT]:
    return Packed(kind, message=kind(**{task: body}))


def pack_input(message: TaskInput) -> Packed[TaskInput]:
    return Packed(TaskInput, message=message)


def pack_result(message: TaskResult) -> Packed[TaskResult]:
    return Packed(TaskResult, message=message)


def pack_texts(task: str, texts: Iterable[GeneratedText]) -> Packed[TaskResult]:
    """Packs the result of a task that generates."""
    result = TaskResult()
    getattr(result, task).sequences.extend(texts)
    return pack_result(result)


class TensorSets:
    """The arrays of an input's sequences, one set for each. Arrays that are read from bytes are views on the bytes."""

    __slots__ = ("_arrays", "_data")

    def __init__(self, *, arrays: Sequence[Arrays] | None = None, data: Sequence[bytes] | None = None) -> None:
        """Takes one of the two forms. `data`: serialized TensorSet messages."""
        self._arrays = arrays
        self._data = data

    def __len__(self) -> int:
        sets = self._arrays if self._arrays is not None else self._data
        return len(sets or ())

    @property
    def arrays(self) -> Sequence[Arrays]:
        """The named arrays of each sequence. Raises InvalidInput if the bytes cannot be parsed."""
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
        """The size of the serialized messages. The size of arrays excludes names and shapes."""
        if self._data is not None:
            return sum(map(len, self._data))
        return sum([array.nbytes for arrays in self._arrays or () for array in arrays.values()])


NO_TENSORS = TensorSets(arrays=())


def _only_task(data: bytes) -> str | None:
    """Returns the task of a serialized message with a single field (the usual case); None if it must be parsed."""
    try:
        number_and_type, position = varint(data, 0)
        length, position = varint(data, position)
    except IndexError:
        return None
    if number_and_type & 7 != _LENGTH_DELIMITED or position + length != len(data):
        return None
    return _TASKS.get(number_and_type >> 3)
