"""The doors of a gateway, and the services that each door offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuronpipe.bundles.sources import open_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.native import INFERENCE_SERVICE, MODEL_SERVICE, NativeDoor
from neuronpipe.doors.oip.grpc_door import OIP_SERVICE, OipDoor
from neuronpipe.doors.oip.service import ModelControl, TensorService
from neuronpipe.doors.tei import SERVICES, tei_handlers
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.door import Door, Guard
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.settings import ProcessSettings, RepositorySettings
from neuronpipe.platform.tls import ServerTls, WatchedTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.rpcs import RpcHandlers
from neuronpipe.rpc.trace_service import TraceDoor, trace_services

if TYPE_CHECKING:
    from neuronpipe.doors.http.door import HttpDoor
    from neuronpipe.doors.http.exchange import HttpHandlers

# The gRPC services that make sense only while all stages can be reached.
INFERENCE_SERVICES = [service.full_name for service in (INFERENCE_SERVICE, OIP_SERVICE, *SERVICES.values())]
# Seconds for which a caller's stream, such as InferStream, may be open without a request in it.
_MAX_STREAM_IDLE_S = 300.0


@dataclass(frozen=True, slots=True)
class Protocols:
    """Rpcs and routes with their handlers, for doors. /openapi.json does not describe the routes in `pages`."""

    rpcs: RpcHandlers
    routes: "HttpHandlers" = ()
    pages: "HttpHandlers" = ()


class GatewayDoors:
    """The doors of gRPC, and of HTTP if it has an address. Modules of HTTP are imported only for its door."""

    def __init__(
        self,
        process: ProcessSettings,
        settings: GatewaySettings,
        telemetry: Telemetry,
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        *,
        further_services: Sequence[str] = (),
        shares_port: bool = False,
    ) -> None:
        """`further_services`: gRPC services of packages above the gateway.

        `shares_port`: whether other processes listen on the same ports.
        """
        services = [*INFERENCE_SERVICES, MODEL_SERVICE.full_name, *trace_services(telemetry.traces), *further_services]
        limit_s = _MAX_STREAM_IDLE_S
        self.grpc = GrpcDoor(
            process, services, tls, guard, shares_port=shares_port, listens_when_open=True, max_stream_idle_s=limit_s
        )
        self.all: list[Door] = [self.grpc]
        self._http: HttpDoor | None = None
        if settings.http.http_listen:
            from neuronpipe.doors.http import door as http_door

            service, limit_bytes = INFERENCE_SERVICE.full_name, settings.pipeline.max_input_bytes
            self._http = http_door.HttpDoor(
                process, settings.http, service, tls, guard, max_input_bytes=limit_bytes, shares_port=shares_port
            )
            self.all.append(self._http)

    def open(self, *several: Protocols) -> None:
        """Answers calls from now on. Raises SetupError where a door cannot listen any more."""
        self.grpc.open([pair for protocols in several for pair in protocols.rpcs])
        if self._http:
            from neuronpipe.doors.http.exchange import HEALTH_ROUTES
            from neuronpipe.doors.http.openapi import openapi_handlers

            routes = [pair for protocols in several for pair in protocols.routes]
            pages = [pair for protocols in several for pair in protocols.pages]
            self._http.open([*routes, *openapi_handlers((*HEALTH_ROUTES, *(route for route, _ in routes))), *pages])


def gateway_protocols(
    gateway: Gateway,
    settings: GatewaySettings,
    *,
    models: RepositorySettings,
    tenants: Tenants | None,
    telemetry: Telemetry,
    grpc_port: int,
    health: HealthBoard,
    targets: Sequence[str] = (),
    stage_tls: WatchedTls | None = None,
) -> Protocols:
    """Returns the rpcs and routes of a gateway. `targets`: stages in other processes, which also keep traces.

    Raises SetupError if a default model is not served.
    """
    limits, router, control = settings.pipeline, gateway.catalog.router, None
    inference = Inference(gateway.pipeline, gateway.catalog, limits, settings.http.default_models)
    if settings.model_control and router:
        control = ModelControl(open_repository(models.repository), tenants, router)

    def is_ready() -> bool:
        return bool(health.is_serving(INFERENCE_SERVICE.full_name))

    tensors = TensorService(gateway, limits, telemetry.meters, is_ready, control)
    traces = TraceDoor(telemetry.traces, targets, stage_tls) if telemetry.traces else None
    rpcs = [
        *NativeDoor(gateway.pipeline, gateway.catalog, limits).handlers(),
        *OipDoor(tensors, limits.max_stream_in_flight).handlers(),
        *tei_handlers(inference),
        *(traces.handlers() if traces else ()),
    ]
    if not settings.http.http_listen:
        return Protocols(rpcs)
    from neuronpipe.doors.http.console.pages import console_handlers
    from neuronpipe.doors.http.handlers import http_handlers

    routes = http_handlers(inference, tensors, telemetry)
    if not settings.http.has_console:
        return Protocols(rpcs, routes)
    get_trace = traces.get_trace if traces else None
    return Protocols(rpcs, routes, console_handlers(gateway.catalog, telemetry.meters, grpc_port, get_trace))
