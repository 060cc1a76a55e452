"""Channels to services, and what a failed call means."""

import json
from collections.abc import Mapping
from typing import TypeAlias

import grpc
from google.rpc.status_pb2 import Status

from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.core.status import from_status

ServiceConfig: TypeAlias = Mapping[str, object]

STATUS_DETAILS = "grpc-status-details-bin"

_PING_INTERVAL_MS = 20_000


def open_channel(target: str, service_config: ServiceConfig | None = None) -> grpc.aio.Channel:
    """A channel that spreads calls over all addresses of its target and reconnects soon after a loss."""
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
            # Detects a peer that vanished without closing the connection; servers allow it (rpc/door.py).
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
    if failure.code() is grpc.StatusCode.CANCELLED:  # not by the caller, which would see asyncio.CancelledError
        return Unavailable("the server ended the call, as it stops")
    return from_status(Status(code=failure.code().value[0], message=failure.details() or failure.code().name))
