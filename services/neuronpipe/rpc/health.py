"""gRPC's health service, over the health of the process."""

from collections.abc import AsyncIterator

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.rpc.rpcs import Context, by_path
from neuronpipe.rpc.transport import CallEnd

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_NOT_FOUND = 5  # google.rpc.Code
WATCH = f"/{HEALTH_SERVICE.full_name}/Watch"


def health_handlers(board: HealthBoard) -> dict[str, Handler]:
    """The handlers of gRPC's health service (grpc/doc/health-checking.md)."""

    async def check(request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = _status(board.is_serving(request.service))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise CallEnd(_NOT_FOUND)
        return HealthCheckResponse(status=status)

    async def watch(request: HealthCheckRequest, context: Context) -> AsyncIterator[HealthCheckResponse]:
        async for is_serving in board.watch(request.service):
            yield HealthCheckResponse(status=_status(is_serving))

    return by_path(HEALTH_SERVICE, Check=check, Watch=watch)


def _status(is_serving: bool | None) -> "HealthCheckResponse.ServingStatus":
    if is_serving is None:
        return HealthCheckResponse.SERVICE_UNKNOWN
    return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
