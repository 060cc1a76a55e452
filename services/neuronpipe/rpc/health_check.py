"""Asks a server for its health: for containers, whose engine asks by a command."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neuronpipe.core.errors import Unavailable


def check_health(target: str, service: str, timeout_s: float) -> None:
    """Returns where the server at `target` says that a gRPC service of it, or with "" all of it, is serving. Raises Unavailable."""
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise Unavailable(f"{target} does not tell its health: {failure.code().name}") from failure
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    if status != "SERVING":
        raise Unavailable(f"{service or target}: {status}")
