"""A call of a task: its request, the reading of its result, and the method of both clients."""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    EmbeddingPrecision,
    FeatureExtractionResult,
    FeatureType,
    GenerationOptions,
    MultiVectorEmbeddingResult,
    SentenceEmbeddingResult,
    TaskInput,
    TaskResult,
    TextSpan,
    Truncation,
)
from neuronpipe.core.errors import InternalError, InvalidInput
from neuronpipe.core.generation_options import message_fields
from neuronpipe.core.tensors import float_bytes

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[ValueT]):
    """A request, and the reader of its result. `Client` returns the result; with `AsyncClient` it has to be awaited."""

    request: InferRequest
    read: Callable[[TaskResult], ValueT]


class BlockingCaller(Protocol):
    """A client that makes calls at once."""

    _priority: "Priority.ValueType"

    def _call(self, call: TaskCall[ValueT]) -> ValueT: ...


class AsyncCaller(Protocol):
    """A client whose calls are awaited."""

    _priority: "Priority.ValueType"

    def _call(self, call: TaskCall[ValueT]) -> Coroutine[Any, Any, ValueT]: ...


class TaskMethod(Generic[P, ValueT]):
    """A method of both clients, made from a declaration: a function without a body, and the task of its requests.

    The method's arguments are fields of the task's input, except the model and its version. If the task generates, its
    further options are fields of GenerationOptions. `read`: makes the method's value of the task's result.
    """

    def __init__(
        self, declared: Callable[Concatenate[Any, P], ValueT], task: str, read: Callable[[Any], Any] | None
    ) -> None:
        self._declared = declared
        self._task = task
        _, *parameters = inspect.signature(declared).parameters.values()
        self._names = [parameter.name for parameter in parameters]
        self._defaults = {
            parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
        }
        self._generates = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        first = getattr(TaskResult(), task).DESCRIPTOR.fields[0].name
        self._read = read or _READERS.get(first) or attrgetter(first)

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], ValueT]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, Coroutine[Any, Any, ValueT]]: ...
    @overload
    def __get__(self, client: BlockingCaller, owner: type) -> Callable[P, ValueT]: ...

    def __get__(self, client: AsyncCaller | BlockingCaller | None, owner: type) -> Callable[..., Any]:
        """Returns the method of a client. On the class, it is the declaration itself, for its documentation."""
        if client is None:
            return self._declared
        declared = MethodType(self._declared, client)

        @wraps(declared)
        def call(*arguments: Any, **options: Any) -> Any:
            declared(*arguments, **options)  # raises TypeError for arguments that are not declared
            fields = self._defaults | dict(zip(self._names, arguments, strict=False)) | options
            return client._call(TaskCall(self._request(fields, client._priority), self._value))

        return call

    def _value(self, result: TaskResult) -> Any:
        """Raises InternalError for the result of another task."""
        if result.WhichOneof("task") != self._task:
            raise InternalError(f"the server's answer is not a result of {self._task.replace('_', '-')}")
        return self._read(getattr(result, self._task))

    def _request(self, fields: dict[str, Any], priority: "Priority.ValueType") -> InferRequest:
        model, version = fields.pop("model"), fields.pop("version")
        if self._generates:
            truncation = fields.pop("truncation")
            options = {name: fields.pop(name) for name in list(fields) if name not in self._names}
            request = generation_request(
                self._task, model, fields, options, truncation=truncation, version=version, priority=priority
            )
            if (texts := options.get("num_return_sequences") or 1) > 1:
                advice = "this method returns one; call infer, or stream, with an InferRequest"
                raise InvalidInput("options.num_return_sequences", f"{texts} texts, {advice}")
            return request
        if "normalize" in fields:
            fields["skip_normalize"] = not fields.pop("normalize")
        if "chunks" in fields:
            fields["chunks"] = [TextSpan(start=start, end=end) for start, end in fields["chunks"]]
        kinds = getattr(TaskInput(), self._task).DESCRIPTOR.fields_by_name
        checked = {name: _checked(kinds[name], value) for name, value in fields.items()}
        input = cast(TaskInput, {self._task: checked})  # protobuf makes messages of dictionaries
        with valid_unicode({"model": model, "version": version, **checked}):
            return InferRequest(model=model, version=version, input=input, priority=priority)


def task_method(
    task: str, read: Callable[[Any], Any] | None = None
) -> Callable[[Callable[Concatenate[Any, P], ValueT]], TaskMethod[P, ValueT]]:
    """Makes a declaration a method of both clients; see TaskMethod.

    `read`: by default, the value is the result's first field, a vector as an array.
    """
    return lambda declared: TaskMethod(declared, task, read)


_KINDS = {FieldDescriptor.TYPE_STRING: (str, "one text"), FieldDescriptor.TYPE_BYTES: (bytes, "the bytes of a file")}
_RANGES = {FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1)}


def _checked(field: FieldDescriptor, value: object) -> object:
    kind, wanted = _KINDS.get(field.type, (object, ""))
    if field.is_repeated:
        # Each character of a text would count as an element.
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise InvalidInput(field.name, f"takes a list of {'texts' if kind is str else 'ids'}, not {_name(value)}")
        for element in (values := list(value)):
            if not isinstance(element, kind):
                raise InvalidInput(field.name, f"takes texts, not {_name(element)}")
        return values
    least, most = _RANGES.get(field.type, (0, 0))
    if most and isinstance(value, int) and not least <= value <= most:
        raise InvalidInput(field.name, f"{value}, must be from {least} to {most:,}")
    if not isinstance(value, kind):
        hint = "; infer_batch runs many inputs in one call" if isinstance(value, list | tuple) else ""
        raise InvalidInput(field.name, f"takes {wanted}, not {_name(value)}{hint}")
    return value


def _name(value: object) -> str:
    return f"a value of the type {type(value).__name__}"


@contextmanager
def valid_unicode(fields: Mapping[str, object]) -> Iterator[None]:
    """Raises InvalidInput if protobuf cannot encode a text of these fields, or of lists among them, in the block.

    Such a text has half a surrogate pair, for example after a file was read with surrogateescape.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        names = [name for name, value in fields.items() if error.object in (value, *_listed(value))]
        raise InvalidInput([*names, *fields][0], "is no valid Unicode: it has half a surrogate pair") from None


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else ()


# Messages of a chat, or mappings with their fields, role and content.
Messages: TypeAlias = Iterable[ChatMessage | Mapping[str, str]]


def generation_request(
    task: str,
    model: str,
    fields: Mapping[str, Any],
    options: Any,
    *,
    truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
    version: str = "",
    priority: "Priority.ValueType" = Priority.PRIORITY_UNSPECIFIED,
) -> InferRequest:
    """Returns the request of a task that generates. `fields`: the fields of its input; for text_generation the
    prompt or the messages.

    Raises InvalidInput if a value has another type, or is beyond its type's range.
    """
    if task == "text_generation":
        fields = {name: value for name, value in fields.items() if value is not None}
        if len(fields) != 1:
            raise InvalidInput("prompt", "give either a prompt or messages")
    for name, value in fields.items():
        if name != "messages" and not isinstance(value, str):
            raise InvalidInput(name, f"takes one text, not {_name(value)}")
    input_fields = {**fields, "options": _options(options), "truncation": truncation}
    if "messages" in fields:
        input_fields["messages"] = _chat(fields["messages"])
    input = cast(TaskInput, {task: input_fields})  # protobuf makes messages of dictionaries
    with valid_unicode({"model": model, "version": version, **fields}):
        return InferRequest(model=model, version=version, input=input, priority=priority)


def _options(options: Any) -> GenerationOptions:
    if isinstance(options.get("stop_strings"), str):
        raise InvalidInput("options.stop_strings", "takes a list of texts, not one text")
    message = GenerationOptions()
    for name, value in options.items():
        if name not in GenerationOptions.DESCRIPTOR.fields_by_name:
            raise TypeError(f"there is no option {name!r}")
        if value is None:  # the model's own value applies
            continue
        try:
            with valid_unicode({f"options.{name}": value}):
                message.MergeFrom(GenerationOptions(**message_fields({name: value})))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"options.{name}", "takes another type of value, or a smaller number") from error
    return message


def _chat(messages: Messages) -> list[ChatMessage]:
    if isinstance(messages, str | Mapping):
        raise InvalidInput("messages", "takes a list of messages, each with a role and a content")
    try:
        with valid_unicode({"messages": messages}):
            return [message if isinstance(message, ChatMessage) else ChatMessage(**message) for message in messages]
    except (TypeError, ValueError) as error:
        raise InvalidInput("messages", "takes messages, each with a role and a content, both texts") from error


_DTYPES = {
    FeatureType.FEATURE_TYPE_FLOAT32: "<f4",
    FeatureType.FEATURE_TYPE_FLOAT16: "<f2",
    FeatureType.FEATURE_TYPE_INT8: "i1",
}
_PACKED_DTYPES: Mapping["EmbeddingPrecision.ValueType", type[np.int8 | np.uint8]] = {
    EmbeddingPrecision.EMBEDDING_PRECISION_BINARY: np.int8,
    EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY: np.uint8,
    EmbeddingPrecision.EMBEDDING_PRECISION_INT8: np.int8,
    EmbeddingPrecision.EMBEDDING_PRECISION_UINT8: np.uint8,
}


class EmbeddedChunk(NamedTuple):
    """A chunk of a text: its offsets in Unicode code points, the end exclusive, and its vector, float32 [width]."""

    start: int
    end: int
    embedding: NDArray[np.float32]


def chunks_of(result: FeatureExtractionResult) -> Sequence[EmbeddedChunk]:
    """Returns the chunks of a text that was requested by chunks. Raises KeyError if their type is unknown."""
    return [
        EmbeddedChunk(span.start, span.end, vector)
        for span, vector in zip(result.chunks, to_array(result), strict=True)
    ]


def vector_of(result: SentenceEmbeddingResult) -> NDArray[Any]:
    """Returns the vector: float32, or int8 or uint8 for precisions with bytes. Raises KeyError if the type is newer."""
    if result.packed:
        return np.frombuffer(result.packed, _PACKED_DTYPES[result.precision])
    return np.frombuffer(float_bytes(result), "<f4").astype(np.float32)


def matrix_of(result: SentenceEmbeddingResult) -> NDArray[Any]:
    """Returns the vectors of texts, [texts, dimensions]; see vector_of."""
    return vector_of(result).reshape(result.vectors or 1, -1)


def to_array(result: FeatureExtractionResult | MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """Returns float32 of the result's shape, from any type of numbers. Raises KeyError if the type is unknown."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float32)
    if result.scales:
        numbers = numbers.reshape(len(result.scales), -1) * np.array(result.scales, np.float32)[:, np.newaxis]
    return numbers.reshape(tuple(result.shape))


# The first field of a result → the function that makes a method's value of the result: an array, or the only text.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "embedding": vector_of,
    "data": to_array,
    "sequences": lambda result: result.sequences[0],
}
