"""A gateway's doors, and what each of them answers with."""

from collections.abc import Mapping, Sequence

from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.doors.native import INFERENCE_SERVICE, NativeDoor, native_rpcs
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings
from neuronpipe.process.door import Door, Handler
from neuronpipe.process.settings import ServerSettings
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs


def gateway_doors(server: ServerSettings, http: HttpSettings, telemetry: Telemetry) -> list[Door]:
    """gRPC, and HTTP where it has an address; what is not asked for is not even imported."""
    doors: list[Door] = [GrpcDoor(server, [*native_rpcs(), *trace_rpcs(telemetry.traces)])]
    if http.http_listen:
        from neuronpipe.gateway.doors.http.door import HttpDoor
        from neuronpipe.gateway.doors.http.handlers import ROUTES

        health, limit, age_s = INFERENCE_SERVICE.full_name, server.max_message_bytes, server.max_connection_age_s
        doors.append(HttpDoor(http.http_listen, ROUTES, health, limit, age_s))
    return doors


def gateway_handlers(
    gateway: Gateway, pipeline: PipelineSettings, http: HttpSettings, telemetry: Telemetry, targets: Sequence[str] = ()
) -> Mapping[str, Handler]:
    """The handlers of all of its doors. `targets`: stages in other processes, which keep traces, too."""
    native = NativeDoor(gateway.pipeline, gateway.catalog, pipeline)
    handlers: dict[str, Handler] = native.handlers() | trace_handlers(telemetry.traces, targets)
    if http.http_listen:
        from neuronpipe.gateway.doors.http.handlers import http_handlers

        handlers |= http_handlers(gateway, pipeline, http)
    return handlers
