"""Opens channels to services, and converts failed calls to errors."""

import json
from collections.abc import Mapping
from typing import TypeAlias

import grpc
from google.rpc.status_pb2 import Status

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Unavailable
from neuronpipe.core.status import from_status
from neuronpipe.platform.tls import LoadedTls

ServiceConfig: TypeAlias = Mapping[str, object]

STATUS_DETAILS = "grpc-status-details-bin"

_PING_INTERVAL_MS = 20_000
# The server's clock of a deadline may end first; then the call ends CANCELLED with so much left for the caller.
_DEADLINE_SLACK_S = 0.05


def open_channel(
    target: str,
    service_config: ServiceConfig | None = None,
    tls: LoadedTls | None = None,
    server_name: str = "",
    connect_ms: int = 100,
) -> grpc.aio.Channel:
    """A channel that spreads calls over all addresses of its target and reconnects soon after a loss.

    `tls`: without, and to a unix socket, nothing is encrypted. `server_name`: what the server's certificate must name;
    empty: the host of the target. `connect_ms`: what an attempt to connect gets; later ones get up to 2 s if that is
    more.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}], **(service_config or {})})),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # By default, gRPC waits a second after the first refusal and up to two minutes after later ones.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # What its name does not say: the least time that an attempt gets (grpc/doc/connection-backoff.md).
        ("grpc.min_reconnect_backoff_ms", connect_ms),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Detects a peer that vanished without closing the connection; servers allow it (rpc/door.py).
        ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if server_name:
        options.append(("grpc.default_authority", server_name))
    if tls and not unix_path(target):
        return grpc.aio.secure_channel(target, channel_credentials(tls), options=options)
    return grpc.aio.insecure_channel(target, options=options)


def channel_credentials(tls: LoadedTls) -> grpc.ChannelCredentials:
    """gRPC's form of a client's files."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def error_of(failure: grpc.aio.AioRpcError, remaining_s: float | None = None) -> NeuronpipeError:
    """The error of a failed call: the one that the service sent, or else one for gRPC's status.

    `remaining_s`: what was left of the call's deadline; None for none.
    """
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            return from_status(Status.FromString(value))
    if failure.code() is grpc.StatusCode.CANCELLED:  # not by the caller, which would see asyncio.CancelledError
        if remaining_s is not None and remaining_s < _DEADLINE_SLACK_S:
            return DeadlineExceeded("the deadline passed before the result was ready")
        return Unavailable("the server ended the call: it is overloaded, or stops")
    return from_status(Status(code=failure.code().value[0], message=failure.details() or failure.code().name))
