"""Channels to services, the stages behind them, and what a failed call means."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

import grpc
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.stages_pb2_grpc import NeuronExecutorServiceStub, PostprocessorServiceStub, TokenizerServiceStub
from neuronpipe.core.errors import InternalError, NeuronpipeError, Unavailable
from neuronpipe.core.stages import Stages
from neuronpipe.core.status import from_status

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ServiceConfig: TypeAlias = Mapping[str, object]

STATUS_DETAILS = "grpc-status-details-bin"

_PING_INTERVAL_MS = 20_000


def open_channel(target: str, service_config: ServiceConfig | None = None) -> grpc.aio.Channel:
    """A channel that spreads calls over all addresses of its target and finds its way back soon after a loss."""
    return grpc.aio.insecure_channel(
        target,
        options=[
            ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}], **(service_config or {})})),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # gRPC's defaults wait a second after the first refusal and up to two minutes later on.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.dns_min_time_between_resolutions_ms", 1_000),
            # Finds a peer that vanished without a word; servers allow it (rpc/server.py).
            ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )


def error_of(failure: grpc.aio.AioRpcError) -> NeuronpipeError:
    """The error that a failed call stands for: what the service sent, or else what gRPC says."""
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            return from_status(Status.FromString(value))
    return from_status(Status(code=failure.code().value[0], message=failure.details() or failure.code().name))


@asynccontextmanager
async def remote_stages(
    tokenizer_target: str, executor_target: str, postprocessor_target: str
) -> AsyncIterator[tuple[Stages, dict[str, grpc.aio.Channel]]]:
    """The stages behind three targets, and their channels by service name; closed with the block."""
    channels = {
        "tokenizer": open_channel(tokenizer_target),
        "neuron-executor": open_channel(executor_target),
        "postprocessor": open_channel(postprocessor_target),
    }
    try:
        yield (
            Stages(
                tokenize=_stage("tokenizer", TokenizerServiceStub(channels["tokenizer"]).Tokenize),
                execute=_stage("neuron-executor", NeuronExecutorServiceStub(channels["neuron-executor"]).Execute),
                postprocess=_stage("postprocessor", PostprocessorServiceStub(channels["postprocessor"]).Postprocess),
            ),
            channels,
        )
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))


def _stage(service: str, method: Callable[[RequestT], Awaitable[ResponseT]]) -> Callable[[RequestT], Awaitable[ResponseT]]:
    """The stub's method, failing with our errors instead of gRPC's."""

    async def stage(request: RequestT) -> ResponseT:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as failure:
            raise _stage_error(service, failure) from failure

    return stage


def _stage_error(service: str, failure: grpc.aio.AioRpcError) -> NeuronpipeError:
    code = failure.code().value[0]
    is_ours = any(key == STATUS_DETAILS for key, _ in failure.trailing_metadata() or ())
    if is_ours:
        return error_of(failure)
    # CANCELLED: the service ended the call, as its grace after SIGTERM ran out; had our caller left, we would not be here.
    if code in (code_pb2.UNAVAILABLE, code_pb2.CANCELLED):
        return Unavailable(f"the {service} service cannot be reached")
    return InternalError(f"the {service} service failed with {failure.code().name}")
