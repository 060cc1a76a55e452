"""Describes rpcs as values, and pairs them with their handlers for a gRPC door."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call
from neuronpipe.core.names import ROUTE_KEY, TRACEPARENT, TRACESTATE
from neuronpipe.core.parsing import parser
from neuronpipe.core.tracing import SpanContext
from neuronpipe.rpc.transport import ServerCall

Context: TypeAlias = ServerCall
# Answers a request, or the stream of requests of an rpc whose client streams: with one response, or with a stream of
# responses where the server streams.
RpcHandler: TypeAlias = Callable[[Any, Context], Awaitable[Any] | AsyncIterator[Any]]
# Every rpc of a gRPC door with its handler.
RpcHandlers: TypeAlias = Sequence[tuple["Rpc", RpcHandler]]


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a gRPC service, and the conversion of its messages from bytes and to bytes.

    `decode` raises DecodeError, and InvalidInput for a message that would take too much memory.
    """

    path: str
    request_name: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    client_streaming: bool = False
    server_streaming: bool = False
    # Whether an overloaded process may refuse a call before it reads the message.
    is_work: bool = False
    # Whether only gateways call it. A gateway's messages are as large as the requests of all its callers together.
    is_trusted: bool = False
    # The classes of its messages; None for bytes.
    request_class: Any = None
    response_class: Any = None

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
        """Returns the rpc of a descriptor.

        `messages`: a file with messages of the same names and wire format, which replace the method's own messages.
        `max_text_bytes`: limit of all texts and images of a request together.
        """
        request, response = message_classes(method, messages)
        return cls(
            path=f"/{method.containing_service.full_name}/{method.name}",
            request_name=method.input_type.full_name,
            decode=request.FromString if is_trusted else parser(request, method.input_type, max_text_bytes),
            is_trusted=is_trusted,
            encode=response.SerializeToString,
            request_class=request,
            response_class=response,
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
            **fields,
        )

    @property
    def service(self) -> str:
        """The full name of the gRPC service."""
        return self.path.split("/")[1]


def message_classes(method: MethodDescriptor, messages: FileDescriptor | None = None) -> tuple[type[Any], type[Any]]:
    """Returns the classes of a method's request and response, or the classes of the same names in `messages`."""
    request, response = (
        GetMessageClass(messages.message_types_by_name[kind.name] if messages else kind)
        for kind in (method.input_type, method.output_type)
    )
    return request, response


def handlers_of(
    service: ServiceDescriptor,
    handlers: Mapping[str, RpcHandler],
    rpc_of: Callable[[MethodDescriptor], "Rpc"] | None = None,
) -> RpcHandlers:
    """Returns the rpcs of a gRPC service with their handlers, by name. `rpc_of`: makes an rpc; default: Rpc.of."""
    return [((rpc_of or Rpc.of)(service.methods_by_name[name]), handler) for name, handler in handlers.items()]


def call_of(context: Context) -> Call:
    """Returns the caller, the deadline and the trace context of a call."""
    metadata = metadata_of(context, (TRACEPARENT, TRACESTATE, ROUTE_KEY))
    return Call(
        deadline_s=context.deadline_s,
        trace=SpanContext.parse(metadata.get(TRACEPARENT, ""), metadata.get(TRACESTATE, "")) if metadata else None,
        caller=current_caller(),
        route_key=metadata.get(ROUTE_KEY, ""),
    )


def metadata_of(context: Context, keys: Container[str]) -> dict[str, str]:
    """Returns the values of the given metadata keys of a call."""
    return {key: str(value) for key, value in context.metadata if key in keys}
