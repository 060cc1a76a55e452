"""Rpcs as values: what a gRPC door knows of a method besides its handler, and what a handler may ask of a call."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from neuronpipe.core.calls import Call
from neuronpipe.core.names import TRACEPARENT, TRACESTATE
from neuronpipe.core.tracing import SpanContext
from neuronpipe.process.door import Handler

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a gRPC service, and how its messages become bytes and back.

    Its handler is `async (request, context) → response`; where the client streams it gets an async iterator of requests, and where the
    server streams it returns an async iterator of responses, without `async`. `decode` raises DecodeError.
    """

    path: str
    request_name: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    client_streaming: bool = False
    server_streaming: bool = False
    # Whether the process may refuse a call before it reads the message, where it is overloaded.
    is_work: bool = False

    @classmethod
    def of(cls, method: MethodDescriptor, messages: FileDescriptor | None = None, **fields: Any) -> Self:
        """The rpc of a descriptor. `messages`: those of the same names and wire format that it has in place of its own."""
        request, response = message_classes(method, messages)
        return cls(
            path=_path(method.containing_service, method.name),
            request_name=method.input_type.full_name,
            decode=request.FromString,
            encode=response.SerializeToString,
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
            **fields,
        )

    @property
    def service(self) -> str:
        """The full name of the gRPC service."""
        return self.path.split("/")[1]


def message_classes(method: MethodDescriptor, messages: FileDescriptor | None = None) -> tuple[type[Any], type[Any]]:
    """A method's messages, or those of the same names: of requests and of responses."""
    request, response = (
        GetMessageClass(messages.message_types_by_name[kind.name] if messages else kind) for kind in (method.input_type, method.output_type)
    )
    return request, response


def rpcs_of(service: ServiceDescriptor, messages: FileDescriptor | None = None, *, is_work: bool = False) -> list[Rpc]:
    """Every rpc of a gRPC service; see Rpc.of."""
    return [Rpc.of(method, messages, is_work=is_work) for method in service.methods]


def by_path(service: ServiceDescriptor, **handlers: Handler) -> dict[str, Handler]:
    """Handlers of a gRPC service by their full paths instead of their names."""
    return {_path(service, name): handler for name, handler in handlers.items()}


def call_of(context: Context) -> Call:
    """The deadline and the trace context that came with a call."""
    remaining_s = context.time_remaining()
    metadata = {key: str(value) for key, value in context.invocation_metadata() or () if key in (TRACEPARENT, TRACESTATE)}
    return Call(
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
        trace=SpanContext.parse(metadata.get(TRACEPARENT, ""), metadata.get(TRACESTATE, "")) if metadata else None,
    )


def _path(service: ServiceDescriptor, name: str) -> str:
    return f"/{service.full_name}/{name}"
