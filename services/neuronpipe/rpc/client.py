"""A client's connections to services. They follow the files of the client's certificate; failed calls become errors."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value
from google.rpc.status_pb2 import Status

from neuronpipe.core.addresses import is_loopback, unix_path
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError, SetupError, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.core.names import STAGES
from neuronpipe.core.status import STATUS_DETAILS, from_status
from neuronpipe.platform.tls import LoadedTls, TlsFiles, WatchedTls, watched_tls
from neuronpipe.platform.watched import LOOK_EVERY_S

ServiceConfig: TypeAlias = Mapping[str, object]

_PING_INTERVAL_MS = 20_000
# The server's clock of a deadline may end first. Then the call ends CANCELLED with up to this time left at the caller.
_DEADLINE_SLACK_S = 0.05


def open_channel(
    target: str,
    service_config: ServiceConfig | None = None,
    tls: LoadedTls | None = None,
    server_name: str = "",
    connect_ms: int = 100,
) -> grpc.aio.Channel:
    """Returns a channel that spreads calls over all addresses of its target and reconnects soon after a loss.

    - `tls`: None for connections in plain text, which Unix sockets always have.
    - `server_name`: the name that the server's certificate must contain (default: the host of the target).
    - `connect_ms`: the time of the first attempt to connect; later attempts get up to 2 s if that is longer.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}], **(service_config or {})})),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # By default, gRPC waits a second after the first refusal and up to two minutes after later refusals.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, this is the least time of an attempt (grpc/doc/connection-backoff.md).
        ("grpc.min_reconnect_backoff_ms", connect_ms),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Detects a peer that vanished without closing the connection. Our servers allow it (rpc/door.py).
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
    """Converts a client's files to gRPC's form."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def error_of(failure: grpc.aio.AioRpcError, remaining_s: float | None = None) -> NeuronpipeError:
    """Returns the error that the service sent with a failed call, or else the error for gRPC's status.

    `remaining_s`: time that was left until the call's deadline; None without a deadline.
    """
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            with suppress(DecodeError):  # damaged details: the status counts
                return from_status(Status.FromString(value))
    if failure.code() is grpc.StatusCode.CANCELLED:  # by the server: a caller that cancels sees asyncio.CancelledError
        if remaining_s is not None and remaining_s < _DEADLINE_SLACK_S:
            return DeadlineExceeded("the deadline passed before the result was ready")
        return Unavailable("the server ended the call: it is overloaded, or stops")
    return from_status(Status(code=failure.code().value[0], message=failure.details() or failure.code().name))


ResponseT = TypeVar("ResponseT")


def undamaged(response: ResponseT | None) -> ResponseT:
    """Returns a response. Raises InternalError for None, with which gRPC represents bytes that it cannot parse."""
    if response is None:
        raise InternalError("the server's answer is damaged")
    return response


StubsT = TypeVar("StubsT")

# gRPC's default: a server that is started by its first connection answers late, and the attempt must wait for it.
_CONNECT_MS = 20_000


class ServiceConnection(Generic[StubsT]):
    """A channel and its stubs, which follow the TLS files.

    gRPC cannot change the files of a channel. So new files get a new channel, and the old channel ends with its last
    call.
    """

    def __init__(
        self,
        target: str,
        make_stubs: Callable[[grpc.aio.Channel], StubsT],
        service_config: ServiceConfig | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises SetupError if the TLS files are unusable."""
        self._target = target
        self._make_stubs = make_stubs
        self._service_config = service_config
        self._watched = watched_tls(tls, "client") if tls else None
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        # Number of open calls of each channel. New calls use the last channel.
        self._calls: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    @contextmanager
    def use(self) -> Iterator[StubsT]:
        """Yields the stubs for one call, which ends with the block."""
        if self._watched and time.monotonic() >= self._look_at_s:
            self._follow(self._watched)
        channel = self._channel
        self._calls[channel] += 1
        try:
            yield self._stubs
        finally:
            self._calls[channel] -= 1
            self._close_unused(channel)

    async def close(self) -> None:
        """Ends all calls."""
        await asyncio.gather(*self._closing, *(channel.close() for channel in self._calls))

    def _follow(self, watched: WatchedTls) -> None:
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        watched.look()
        if watched.value is not self._tls:
            old = self._channel
            self._open()
            self._close_unused(old)

    def _open(self) -> None:
        self._tls = self._watched.value if self._watched else None
        self._channel = open_channel(self._target, self._service_config, self._tls, connect_ms=_CONNECT_MS)
        self._stubs = self._make_stubs(self._channel)
        self._calls[self._channel] = 0

    def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._calls[channel]:
            del self._calls[channel]
            closing = asyncio.create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


KEY_VARIABLE = "NEURONPIPE_API_KEY"


def key_metadata(api_key: str | None = None, *, target: str, is_encrypted: bool) -> Sequence[tuple[str, str]]:
    """Returns the metadata for an API key or a token (JWT), empty for an empty key. `api_key`: None for the
    environment's key.

    Warns if the key would be sent to another machine in plain text. Raises SetupError for a key that metadata cannot
    hold.
    """
    key = (os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key).strip()
    if not (key.isascii() and key.isprintable()):
        raise SetupError(f"the API key ({KEY_VARIABLE}) holds characters that no key has")
    if key and not is_encrypted and not all(map(_is_local, target.split(","))):
        log_warning("an API key is sent in plain text: use TLS, or any machine on the way can read it", target=target)
    return [("authorization", f"Bearer {key}")] if key else []


def _is_local(target: str) -> bool:
    address = target.strip().removeprefix("dns:///")
    return is_loopback(address if ":" in address else f"{address}:0")


_INFERENCE_SERVICE = "neuronpipe.api.v1.InferenceService"

# https://github.com/grpc/grpc/blob/master/doc/health-checking.md. The protocol's own messages would need another
# package. The request has one field, the name of the service, and the response has one field, the status. So on the
# wire they are a StringValue and a UInt32Value.
_CHECK = "/grpc.health.v1.Health/Check"
_STATUSES = dict(enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")))


def check_health(target: str, service: str | None, timeout_s: float, tls: TlsFiles | None = None) -> str:
    """Returns the gRPC service whose health was asked for, if the server at `target` serves it; "" is the process.

    `service`: None for InferenceService, which a gateway serves while it reaches all stages, or for the whole process
    if the server has no such service. Raises Unavailable, and SetupError for unusable TLS files.
    """
    ends_s = time.monotonic() + timeout_s
    metadata = tuple(key_metadata(target=target, is_encrypted=tls is not None))
    with _open_channel(target, tls) as channel:
        check = channel.unary_unary(_CHECK, StringValue.SerializeToString, UInt32Value.FromString)

        def ask(name: str) -> str:
            try:
                status = check(StringValue(value=name), timeout=ends_s - time.monotonic(), metadata=metadata).value
            except grpc.RpcError as failure:
                if failure.code() == grpc.StatusCode.NOT_FOUND:
                    return "NOT_FOUND"
                cause = ": ".join(filter(None, (failure.code().name, failure.details())))
                raise Unavailable(f"{target} does not report its health: {cause}") from failure
            return _STATUSES.get(status, str(status))

        name = _INFERENCE_SERVICE if service is None else service
        status = ask(name)
        if service is None and status == "NOT_FOUND":
            name, status = "", ask("")
        if status == "NOT_FOUND":
            raise Unavailable(f"{target} does not report its health: NOT_FOUND")
        if status != "SERVING":
            missing = [stage for stage in STAGES if ask(stage) == "NOT_SERVING"] if name == _INFERENCE_SERVICE else []
            raise Unavailable(
                f"{name or target}: {status}" + (f"; it does not reach: {', '.join(missing)}" if missing else "")
            )
    return name


def _open_channel(target: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls and not unix_path(target):
        return grpc.secure_channel(target, channel_credentials(watched_tls(tls, "client").value))
    return grpc.insecure_channel(target)
