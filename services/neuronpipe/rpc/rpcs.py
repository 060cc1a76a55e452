"""Describes rpcs as values: what a gRPC door knows of a method besides its handler."""

import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call
from neuronpipe.core.names import ROUTE_KEY, TRACEPARENT, TRACESTATE
from neuronpipe.core.parsing import parser
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.process.door import Handler
from neuronpipe.rpc.transport import ServerCall

Context: TypeAlias = ServerCall


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a gRPC service, and how its messages become bytes and back.

    Its handler is `async (request, context) → response`. If the client streams, the handler gets an async iterator of
    requests. If the server streams, it returns an async iterator of responses, without `async`. `decode` raises
    DecodeError, and InvalidInput for a message that would take too much memory.
    """

    path: str
    request_name: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    client_streaming: bool = False
    server_streaming: bool = False
    # Whether an overloaded process may refuse a call before it reads the message.
    is_work: bool = False
    # Of the gateway alone, whose messages are as large as its callers' requests together.
    is_trusted: bool = False

    @classmethod
    def of(
        cls,
        method: MethodDescriptor,
        messages: FileDescriptor | None = None,
        *,
        is_trusted: bool = False,
        max_text_bytes: int = sys.maxsize,
        **fields: Any,
    ) -> Self:
        """The rpc of a descriptor.

        `messages`: a file with messages of the same names and wire format, to use in place of the method's own.
        `max_text_bytes`: of the texts and images of a request together.
        """
        request, response = message_classes(method, messages)
        return cls(
            path=_path(method.containing_service, method.name),
            request_name=method.input_type.full_name,
            decode=request.FromString if is_trusted else parser(request, method.input_type, max_text_bytes),
            is_trusted=is_trusted,
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
    """The classes of a method's request and response, or those of the same names in `messages`."""
    request, response = (
        GetMessageClass(messages.message_types_by_name[kind.name] if messages else kind)
        for kind in (method.input_type, method.output_type)
    )
    return request, response


def rpcs_of(service: ServiceDescriptor, messages: FileDescriptor | None = None, **fields: Any) -> list[Rpc]:
    """Every rpc of a gRPC service; see Rpc.of."""
    return [Rpc.of(method, messages, **fields) for method in service.methods]


def by_path(service: ServiceDescriptor, **handlers: Handler) -> dict[str, Handler]:
    """Handlers of a gRPC service by their full paths instead of their names."""
    return {_path(service, name): handler for name, handler in handlers.items()}


def call_of(context: Context) -> Call:
    """The caller, the deadline and the trace context of a call."""
    metadata = metadata_of(context, (TRACEPARENT, TRACESTATE, ROUTE_KEY))
    return Call(
        deadline_s=context.deadline_s,
        trace=SpanContext.parse(metadata.get(TRACEPARENT, ""), metadata.get(TRACESTATE, "")) if metadata else None,
        caller=current_caller(),
        route_key=metadata.get(ROUTE_KEY, ""),
    )


def metadata_of(context: Context, keys: Container[str]) -> dict[str, str]:
    """What a call's metadata say of these keys."""
    return {key: str(value) for key, value in context.metadata if key in keys}


def _path(service: ServiceDescriptor, name: str) -> str:
    return f"/{service.full_name}/{name}"
