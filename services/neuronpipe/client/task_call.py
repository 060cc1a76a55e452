"""A call of a task: how its request is made, how its result is read, and the method that both clients have of it."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, overload

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
    TextGenerationInput,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import message_fields

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[ValueT]):
    """A request, and how its result is read. `Client` returns the result; with `AsyncClient` it has to be awaited."""

    request: InferRequest
    read: Callable[[TaskResult], ValueT]


class Caller(Protocol):
    """A client that makes calls at once."""

    def _call(self, call: TaskCall[ValueT]) -> ValueT: ...


class AsyncCaller(Protocol):
    """A client whose calls are awaited."""

    def _call(self, call: TaskCall[ValueT]) -> Coroutine[Any, Any, ValueT]: ...


class TaskMethod(Generic[P, ValueT]):
    """A method that prepares a call. The client of the method then makes the call."""

    def __init__(self, prepare: Callable[Concatenate[Any, P], TaskCall[ValueT]]) -> None:
        self._prepare = prepare

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], TaskCall[ValueT]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, Coroutine[Any, Any, ValueT]]: ...
    @overload
    def __get__(self, client: Caller, owner: type) -> Callable[P, ValueT]: ...

    def __get__(self, client: AsyncCaller | Caller | None, owner: type) -> Callable[..., Any]:
        """The method of one client. On the class, it is the function itself, for its documentation."""
        if client is None:
            return self._prepare
        prepare = MethodType(self._prepare, client)

        @wraps(prepare)
        def call(*arguments: Any, **options: Any) -> Any:
            return client._call(prepare(*arguments, **options))

        return call


# Messages of a chat, or what has their fields, role and content.
Messages: TypeAlias = Iterable[ChatMessage | Mapping[str, str]]


def generation_request(
    model: str,
    prompt: str | None,
    options: Any,
    *,
    messages: Messages | None = None,
    truncation: "Truncation.ValueType",
    version: str,
    priority: "Priority.ValueType",
) -> InferRequest:
    """The request. Raises InvalidInput for a value that is of no type of its field, or beyond its type's range."""
    if (prompt is None) == (messages is None):
        raise InvalidInput("prompt", "give either a prompt or messages")
    if not isinstance(prompt, str | None):
        raise InvalidInput("prompt", f"takes one text, not a value of the type {type(prompt).__name__}")
    message = _options(options)
    text_generation = TextGenerationInput(
        prompt=prompt or "", messages=_chat(messages or ()), options=message, truncation=truncation
    )
    return InferRequest(
        model=model, version=version, input=TaskInput(text_generation=text_generation), priority=priority
    )


def text_request(
    task: str,
    model: str,
    texts: Mapping[str, str],
    options: Any,
    *,
    truncation: "Truncation.ValueType",
    version: str,
    priority: "Priority.ValueType",
) -> InferRequest:
    """The request of a task that writes a text about another: `texts` are the fields of its input. Raises InvalidInput
    as generation_request does.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise InvalidInput(name, f"takes one text, not a value of the type {type(text).__name__}")
    input = TaskInput()
    getattr(input, task).MergeFrom(
        type(getattr(input, task))(**texts, options=_options(options), truncation=truncation)
    )
    return InferRequest(model=model, version=version, input=input, priority=priority)


def _options(options: Any) -> GenerationOptions:
    if isinstance(options.get("stop_strings"), str):
        raise InvalidInput("options.stop_strings", "takes a list of texts, not one text")
    message = GenerationOptions()
    for name, value in options.items():
        if name not in GenerationOptions.DESCRIPTOR.fields_by_name:
            raise TypeError(f"there is no option {name!r}")
        if value is None:  # the model's own
            continue
        try:
            message.MergeFrom(GenerationOptions(**message_fields({name: value})))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"options.{name}", "takes another type of value, or a smaller number") from error
    return message


def _chat(messages: Messages) -> list[ChatMessage]:
    if isinstance(messages, str | Mapping):
        raise InvalidInput("messages", "takes a list of messages, each with a role and a content")
    try:
        return [one if isinstance(one, ChatMessage) else ChatMessage(**one) for one in messages]
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
    """The chunks of a text that was asked for by chunks. Raises KeyError for a type of a newer server."""
    return [
        EmbeddedChunk(span.start, span.end, vector)
        for span, vector in zip(result.chunks, to_array(result), strict=True)
    ]


def vector_of(result: SentenceEmbeddingResult) -> NDArray[Any]:
    """The vector: float32, or int8 or uint8 of a precision with bytes. Raises KeyError for one of a newer server."""
    if result.packed:
        return np.frombuffer(result.packed, _PACKED_DTYPES[result.precision])
    return np.array(result.embedding, np.float32)


def to_array(result: FeatureExtractionResult | MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """float32 of the result's shape, from any type of numbers. Raises KeyError for a type of a newer server."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float32)
    if result.scales:
        numbers = numbers.reshape(len(result.scales), -1) * np.array(result.scales, np.float32)[:, np.newaxis]
    return numbers.reshape(tuple(result.shape))
