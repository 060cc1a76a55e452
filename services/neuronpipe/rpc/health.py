"""gRPC's health service (grpc/doc/health-checking.md)."""

from collections.abc import AsyncIterator

from google.rpc.code_pb2 import NOT_FOUND
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.rpc.rpcs import Context, RpcHandlers, handlers_of
from neuronpipe.rpc.transport import CallEnd

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
WATCH = f"/{HEALTH_SERVICE.full_name}/Watch"


def health_handlers(board: HealthBoard) -> RpcHandlers:
    """Returns the rpcs of the health service, which show the health of the process."""
    statuses = {
        None: HealthCheckResponse.SERVICE_UNKNOWN,
        True: HealthCheckResponse.SERVING,
        False: HealthCheckResponse.NOT_SERVING,
    }

    async def check(request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        is_serving = board.is_serving(request.service)
        if is_serving is None:
            raise CallEnd(NOT_FOUND)
        return HealthCheckResponse(status=statuses[is_serving])

    async def watch(request: HealthCheckRequest, context: Context) -> AsyncIterator[HealthCheckResponse]:
        async for is_serving in board.watch(request.service):
            yield HealthCheckResponse(status=statuses[is_serving])

    return handlers_of(HEALTH_SERVICE, {"Check": check, "Watch": watch})
