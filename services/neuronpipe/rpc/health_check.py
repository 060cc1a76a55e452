"""Asks a server for its health, by gRPC's health protocol."""

import time

import grpc
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.errors import Unavailable
from neuronpipe.platform.tls import TlsFiles, watched_tls
from neuronpipe.rpc.client import channel_credentials, key_metadata

_INFERENCE_SERVICE = "neuronpipe.api.v1.InferenceService"
# A gateway also reports the health of these: whether it reaches them.
_STAGES = ("tokenizer", "neuron-executor", "postprocessor")

# https://github.com/grpc/grpc/blob/master/doc/health-checking.md. The protocol's own messages would need another
# package. The request's only field is the service's name and the response's the status, so that on the wire they are a
# StringValue and a UInt32Value.
_CHECK = "/grpc.health.v1.Health/Check"
_STATUSES = dict(enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")))


def check_health(target: str, service: str | None, timeout_s: float, tls: TlsFiles | None = None) -> str:
    """Returns the gRPC service of the server at `target` that was asked for, if it is serving; "" is the whole process.

    With `service` None, it asks for what callers need: InferenceService, which a gateway serves while it reaches all
    stages, or the process of a server that has no such service. Raises Unavailable, and SetupError for TLS files that
    cannot be used.
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
                raise Unavailable(f"{target} does not report its health: {failure.code().name}") from failure
            return _STATUSES.get(status, str(status))

        name = _INFERENCE_SERVICE if service is None else service
        status = ask(name)
        if service is None and status == "NOT_FOUND":
            name, status = "", ask("")
        if status == "NOT_FOUND":
            raise Unavailable(f"{target} does not report its health: NOT_FOUND")
        if status != "SERVING":
            missing = [stage for stage in _STAGES if ask(stage) == "NOT_SERVING"] if name == _INFERENCE_SERVICE else []
            raise Unavailable(
                f"{name or target}: {status}" + (f"; it does not reach: {', '.join(missing)}" if missing else "")
            )
    return name


def _open_channel(target: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls and not unix_path(target):
        return grpc.secure_channel(target, channel_credentials(watched_tls(tls, "client").value))
    return grpc.insecure_channel(target)
