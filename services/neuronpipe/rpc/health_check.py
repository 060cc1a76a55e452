"""Asks a server for its health, by gRPC's health protocol."""

import time

import grpc
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from neuronpipe.core.errors import Unavailable

_INFERENCE_SERVICE = "neuronpipe.api.v1.InferenceService"
# A gateway may tell the health of these, too: whether it reaches them.
_STAGES = ("tokenizer", "neuron-executor", "postprocessor")

# https://github.com/grpc/grpc/blob/master/doc/health-checking.md. The protocol's own messages would need another package. The request's
# only field is the service's name and the response's the status, so that on the wire they are a StringValue and a UInt32Value.
_CHECK = "/grpc.health.v1.Health/Check"
_STATUSES = dict(enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")))


def check_health(target: str, service: str | None, timeout_s: float) -> str:
    """Returns which gRPC service of the server at `target` is serving; "" is the process as a whole. Raises Unavailable.

    `service` None asks for what callers need: InferenceService, which a gateway serves while it reaches all stages, or the process of a
    server that has none.
    """
    ends_s = time.monotonic() + timeout_s
    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary(_CHECK, StringValue.SerializeToString, UInt32Value.FromString)

        def ask(name: str) -> str:
            try:
                status = check(StringValue(value=name), timeout=ends_s - time.monotonic()).value
            except grpc.RpcError as failure:
                if failure.code() == grpc.StatusCode.NOT_FOUND:
                    return "NOT_FOUND"
                raise Unavailable(f"{target} does not tell its health: {failure.code().name}") from failure
            return _STATUSES.get(status, str(status))

        name = _INFERENCE_SERVICE if service is None else service
        status = ask(name)
        if service is None and status == "NOT_FOUND":
            name, status = "", ask("")
        if status == "NOT_FOUND":
            raise Unavailable(f"{target} does not tell its health: NOT_FOUND")
        if status != "SERVING":
            missing = [stage for stage in _STAGES if ask(stage) == "NOT_SERVING"] if name == _INFERENCE_SERVICE else []
            raise Unavailable(f"{name or target}: {status}" + (f"; it does not reach: {', '.join(missing)}" if missing else ""))
    return name
