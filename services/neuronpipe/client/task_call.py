"""A call of a task: its request, the reading of its result, and the method of both clients."""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np
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
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import message_fields

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[ValueT]):
    """A request, and the reader of its result. `Client` returns the result; with `AsyncClient` it has to be awaited."""

    request: InferRequest
    read: Callable[[TaskResult], ValueT]


class BlockingCaller(Protocol):
    """A client that makes calls at once."""

    def _call(self, call: TaskCall[ValueT]) -> ValueT: ...


class AsyncCaller(Protocol):
    """A client whose calls are awaited."""

    def _call(self, call: TaskCall[ValueT]) -> Coroutine[Any, Any, ValueT]: ...


class TaskMethod(Generic[P, ValueT]):
    """A method that prepares a call, which the client of the method then makes."""

    def __init__(self, prepare: Callable[Concatenate[Any, P], TaskCall[ValueT]]) -> None:
        self._prepare = prepare

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], TaskCall[ValueT]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, Coroutine[Any, Any, ValueT]]: ...
    @overload
    def __get__(self, client: BlockingCaller, owner: type) -> Callable[P, ValueT]: ...

    def __get__(self, client: AsyncCaller | BlockingCaller | None, owner: type) -> Callable[..., Any]:
        """Returns the method of a client. On the class, it is the function itself, for its documentation."""
        if client is None:
            return self._prepare
        prepare = MethodType(self._prepare, client)

        @wraps(prepare)
        def call(*arguments: Any, **options: Any) -> Any:
            return client._call(prepare(*arguments, **options))

        return call


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

    Raises InvalidInput for a value of another type, or beyond its type's range.
    """
    if task == "text_generation":
        fields = {name: value for name, value in fields.items() if value is not None}
        if len(fields) != 1:
            raise InvalidInput("prompt", "give either a prompt or messages")
    for name, value in fields.items():
        if name != "messages" and not isinstance(value, str):
            raise InvalidInput(name, f"takes one text, not a value of the type {type(value).__name__}")
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
    """Returns the chunks of a text that was requested by chunks. Raises KeyError for a type of a newer server."""
    return [
        EmbeddedChunk(span.start, span.end, vector)
        for span, vector in zip(result.chunks, to_array(result), strict=True)
    ]


def vector_of(result: SentenceEmbeddingResult) -> NDArray[Any]:
    """Returns the vector: float32, or int8 or uint8 for precisions with bytes. Raises KeyError for a newer type."""
    if result.packed:
        return np.frombuffer(result.packed, _PACKED_DTYPES[result.precision])
    return np.array(result.embedding, np.float32)


def to_array(result: FeatureExtractionResult | MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """Returns float32 of the result's shape, from any type of numbers. Raises KeyError for a type of a newer server."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float32)
    if result.scales:
        numbers = numbers.reshape(len(result.scales), -1) * np.array(result.scales, np.float32)[:, np.newaxis]
    return numbers.reshape(tuple(result.shape))
