"""A gRPC server with health, reflection, error mapping and graceful shutdown, the same for every service.

The life of one: listen (calls are refused as "starting") → load → SERVING → SIGTERM → NOT_SERVING → refuse new calls, finish those in
flight within the grace → unload.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from neuronpipe.core.config import ServerSettings
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded, SetupError, Unavailable
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Traces
from neuronpipe.core.stages import Call, internal_error
from neuronpipe.core.status import to_status
from neuronpipe.core.telemetry import TRACEPARENT, TRACESTATE
from neuronpipe.rpc.calls import Calls
from neuronpipe.rpc.health import StoppableHealth
from neuronpipe.rpc.traces import TRACE_SERVICE, trace_methods

# A method: (message, context) → message, or with streams (messages, context) → async iterator of messages.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method: TypeAlias = Callable[[Any, Context], Any]
SetServing: TypeAlias = Callable[[str, bool], Awaitable[None]]
# Makes a service's methods by name and unmakes them. Gets a function to say whether one of the server's gRPC services is serving.
Assemble: TypeAlias = Callable[[SetServing], contextlib.AbstractAsyncContextManager[Mapping[str, Method]]]

STATUS_DETAILS = "grpc-status-details-bin"
RETRY_PUSHBACK = "grpc-retry-pushback-ms"

_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A client takes 8 KiB of trailers and calls more RESOURCE_EXHAUSTED. The message travels twice: percent-encoded, at worst three bytes
# for one, and within the status in Base64.
_MAX_STATUS_BYTES = 1500
_SHORTENED_CHARACTERS = 300

_MIN_PING_INTERVAL_MS = 10_000

# How long models may take to unload once all calls have ended; a device that hangs must not keep the process.
_UNLOAD_LIMIT_S = 10.0
# How long calls in flight get at most where a part of the service has crashed: enough for all to be answered, with its error or another's.
_CRASH_GRACE_S = 2.0


async def serve(
    name: str,
    settings: ServerSettings,
    services: Sequence[ServiceDescriptor],
    assemble: Assemble,
    *,
    follow: Collection[str] = (),
    traces: Traces | None = None,
    stage_targets: Sequence[str] = (),
) -> None:
    """Serves until SIGTERM or SIGINT. `follow` names the services whose health `assemble` reports itself.

    With `traces` it serves TraceService, too, and asks the servers at `stage_targets` for theirs.

    Raises SetupError for an address that cannot be used, and whatever `assemble` raises.
    """
    loop, serving, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    services = [*services, *([TRACE_SERVICE] if traces else [])]
    server = _Server(name, settings, services)

    def on_signal() -> None:
        stop.set()
        if serving and not server.is_open:  # loading can take minutes
            serving.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    give_up = None
    try:
        await server.start()
        async with assemble(server.set_serving) as own_methods:
            methods = {**own_methods, **(trace_methods(traces, stage_targets) if traces else {})}
            await server.open(methods, [*(service.full_name for service in services if service.full_name not in follow), ""])
            try:
                await stop.wait()
                await server.drain(settings.grace_s)
            except asyncio.CancelledError:  # what was assembled has crashed; its end may take long, which nobody shall wait for
                await server.drain(min(settings.grace_s, _CRASH_GRACE_S))
                raise
            finally:
                give_up = loop.call_later(_UNLOAD_LIMIT_S, _end_process)
    except asyncio.CancelledError:
        if server.is_open or not stop.is_set() or not serving:
            raise
        serving.uncancel()
    finally:
        await server.stop()
        if give_up:
            give_up.cancel()
    log("stopped")


def _end_process() -> None:
    log_warning("a batch did not end; the process ends without it", limit_s=_UNLOAD_LIMIT_S)
    os._exit(1)


def call_of(context: Context) -> Call:
    """The deadline and the trace context that came with a call."""
    remaining_s = context.time_remaining()
    metadata = {key: str(value) for key, value in context.invocation_metadata() or () if key in (TRACEPARENT, TRACESTATE)}
    return Call(
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
        traceparent=metadata.get(TRACEPARENT, ""),
        tracestate=metadata.get(TRACESTATE, ""),
    )


class _Server:
    def __init__(self, name: str, settings: ServerSettings, services: Sequence[ServiceDescriptor]) -> None:
        self._name = name
        self._methods: Mapping[str, Method] = {}
        self.is_open = False
        self._calls = Calls(name)
        self._health = StoppableHealth()
        self._server = grpc.aio.server(
            options=[
                # Without this two processes can listen on one port and each gets a share of the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Channels ping while idle (rpc/client.py); the default, five minutes, would cut them off with too_many_pings.
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        self._services = services
        self._settings = settings
        for service in services:
            handlers = {method.name: self._handler(method) for method in service.methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*(service.full_name for service in services), health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens. Raises SetupError."""
        for service in self._services:
            await self.set_serving(service.full_name, False)
        await self.set_serving("", False)
        host = self._settings.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(self._settings.listen)
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {self._settings.listen}: {_bind_problem(self._settings.listen)}") from error
        await self._server.start()
        log("listening", address=f"{host}:{port}")

    async def open(self, methods: Mapping[str, Method], serving: Collection[str]) -> None:
        """Takes calls from now on."""
        self.is_open = True
        self._methods = methods
        for service in serving:
            await self.set_serving(service, True)
        log("ready")

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls, waits for those in flight and for their answers to leave, `grace_s` at most, and ends the rest."""
        deadline_s = time.monotonic() + grace_s
        log("draining", calls=self._calls.count, grace_s=grace_s)
        await self._health.enter_graceful_shutdown()
        # gRPC's own stop would end calls that arrive from now on with CANCELLED, which callers do not retry. It alone knows, though,
        # when the last answer has left.
        await self._calls.drain(grace_s)
        self._health.stop_watches()
        await self._server.stop(max(0.0, deadline_s - time.monotonic()))

    async def stop(self) -> None:
        """Ends every call and connection."""
        await self._server.stop(0)

    async def set_serving(self, service: str, is_serving: bool) -> None:
        """Reports a service's health; "" is the process as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    def _handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        message_class = GetMessageClass(method.input_type)

        # A message that cannot be parsed must be answered as the caller's fault; gRPC's own deserializers end in UNKNOWN.
        def decoded(data: bytes) -> Message:
            try:
                return message_class.FromString(data)
            except DecodeError as error:
                problem = f"is no valid {message_class.DESCRIPTOR.full_name}: broken, or holds a string that is not UTF-8"
                raise InvalidInput("request", problem) from error

        async def unary(data: bytes, context: Context) -> Message:
            try:
                with self._calls.one_more():
                    response: Message = await self._method(method.name)(decoded(data), context)
                    return response
            except Exception as error:
                await _abort(context, error)

        async def stream(data: AsyncIterator[bytes], context: Context) -> AsyncIterator[Message]:
            try:
                with self._calls.one_more():
                    function = self._method(method.name)  # first: messages that nobody reads would be complained of
                    messages = (decoded(one) async for one in self._calls.read(aiter(data)))
                    async with contextlib.aclosing(function(messages, context)) as responses:
                        async for response in responses:
                            yield response
            except Exception as error:
                await _abort(context, error)

        serialize = GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serialize)
        return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serialize)

    def _method(self, name: str) -> Method:
        if name not in self._methods:
            raise Unavailable(f"the {self._name} service is starting")
        return self._methods[name]


async def _abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status that its error stands for."""
    if isinstance(error, grpc.aio.AbortError):  # ended already
        raise error
    status = to_status(error if isinstance(error, NeuronpipeError) else internal_error(error, ""))
    if status.ByteSize() > _MAX_STATUS_BYTES:
        status = Status(code=status.code, message=f"{status.message[:_SHORTENED_CHARACTERS]}…", details=status.details[:1])
    trailer: list[tuple[str, str | bytes]] = [(STATUS_DETAILS, status.SerializeToString())]
    if isinstance(error, Overloaded):
        trailer.append((RETRY_PUSHBACK, str(max(1, round(error.retry_after_s * 1000)))))
    try:
        await context.abort(_CODES[status.code], status.message, tuple(trailer))
    except grpc.aio.InternalError:  # the call has ended meanwhile; as gRPC would have said, had it noticed in time
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


def _bind_problem(address: str) -> str:
    """Why an address cannot be listened on, in the operating system's words."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(resolved)
    except OSError as error:
        return error.strerror or "no such address"
    return "gRPC refuses the address"
