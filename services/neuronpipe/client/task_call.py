"""Defines the methods of tasks once, for both clients."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskResult

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
