"""A gateway's doors, and what each of them answers with."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.http.exchange import Route
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.doors.native import INFERENCE_SERVICE, NativeDoor, native_rpcs
from neuronpipe.doors.oip.grpc_door import OIP_SERVICE, OipDoor, oip_rpcs
from neuronpipe.doors.oip.service import TensorService, model_control
from neuronpipe.doors.tei import SERVICES, TeiDoor, tei_rpcs
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.door import Door, Guard, Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.tls import ServerTls, WatchedTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.rpcs import Rpc
from neuronpipe.rpc.scaler import Load, scaler_handlers, scaler_rpcs
from neuronpipe.rpc.trace_service import GET_TRACE, trace_handlers, trace_rpcs

# The gRPC services that make sense only while all stages can be reached.
INFERENCE_SERVICES = [service.full_name for service in (INFERENCE_SERVICE, OIP_SERVICE, *SERVICES.values())]


@dataclass(frozen=True, slots=True)
class Addition:
    """What a package above the gateway has its doors take besides: its handlers have the same keys.

    `routes`: asked for where there is an HTTP door.
    """

    rpcs: Sequence[Rpc] = ()
    routes: Callable[[], Sequence[Route]] = tuple


def gateway_doors(
    settings: GatewaySettings,
    telemetry: Telemetry,
    tls: ServerTls | None = None,
    guard: Guard | None = None,
    *,
    addition: Addition = Addition(),
    shares_port: bool = False,
) -> list[Door]:
    """gRPC, and HTTP where it has an address; what is not asked for is not even imported. `shares_port`: other
    processes listen on the same ports.
    """
    rpcs = [
        *native_rpcs(max(settings.max_input_bytes, settings.max_image_bytes)),
        *oip_rpcs(),
        *tei_rpcs(settings.max_input_bytes),
        *trace_rpcs(telemetry.traces),
        *addition.rpcs,
    ]
    doors: list[Door] = [GrpcDoor(settings, rpcs, tls, guard, shares_port=shares_port, listens_when_open=True)]
    if settings.http_listen:
        from neuronpipe.doors.http.console.pages import CONSOLE_ROUTES
        from neuronpipe.doors.http.door import HttpDoor
        from neuronpipe.doors.http.handlers import ROUTES

        routes = (*ROUTES, *addition.routes(), *(CONSOLE_ROUTES if settings.has_console else ()))
        health = INFERENCE_SERVICE.full_name
        doors.append(HttpDoor(settings, routes, health, tls, guard, shares_port=shares_port))
    return doors


def gateway_handlers(
    gateway: Gateway,
    settings: GatewaySettings,
    tenants: Tenants | None,
    telemetry: Telemetry,
    doors: Sequence[Door],
    health: HealthBoard,
    targets: Sequence[str] = (),
    stage_tls: WatchedTls | None = None,
) -> dict[str, Handler]:
    """The handlers of all of its doors, which listen. `targets`: stages in other processes, which keep traces, too.

    Raises SetupError for a default model that is not served.
    """
    inference, models = Inference(gateway.pipeline, settings), ModelChoice(gateway.catalog, settings.default_models)
    tensors = TensorService(
        gateway,
        settings,
        telemetry.meters,
        lambda: bool(health.is_serving(INFERENCE_SERVICE.full_name)),
        model_control(settings, tenants, gateway.catalog.router),
    )
    handlers: dict[str, Handler] = {
        **NativeDoor(gateway.pipeline, gateway.catalog, settings).handlers(),
        **OipDoor(tensors, settings.max_stream_in_flight).handlers(),
        **TeiDoor(inference, models, gateway.catalog, settings).handlers(),
        **trace_handlers(telemetry.traces, targets, stage_tls),
    }
    if settings.http_listen:
        from neuronpipe.doors.http.handlers import http_handlers

        handlers |= http_handlers(inference, models, tensors, gateway, settings, telemetry)
        if settings.has_console:
            from neuronpipe.doors.http.console.pages import console_handlers

            handlers |= console_handlers(gateway.catalog, telemetry.meters, doors[0].port, handlers.get(GET_TRACE))
    return handlers


# KEDA's external scaler for the stages of a gateway, which are needed while it has requests, held ones included.
_METRIC = "neuronpipe-requests"
# Of a trigger: requests in flight for one pod.
_TARGET = "requestsPerPod"
# The largest batch of an executor, by default.
_DEFAULT_TARGET = 32.0
_LOOK_EVERY_S = 0.2


@asynccontextmanager
async def running_scaler(settings: GatewaySettings, gateway: Gateway, health: HealthBoard) -> AsyncIterator[None]:
    """Listens for KEDA while the block runs, at a port of its own: callers show nothing there, and learn of nothing but
    the number of requests. Raises SetupError.
    """
    if not settings.scaler_listen:
        yield
        return

    gate = gateway.pipeline.gate

    async def count() -> int:
        return gate.in_flight[0]

    async def is_active() -> bool:
        return bool(gate.in_flight[0]) or time.monotonic() < gate.last_s + settings.scaler_idle_s

    unlimited = {"max_connection_age_s": 0.0, "max_stream_idle_s": 0.0}
    own = settings.model_copy(update={"listen": settings.scaler_listen, **unlimited})
    door = GrpcDoor(own, scaler_rpcs(), option="--scaler-listen", event="listening for KEDA")
    # Counted by itself: KEDA keeps a stream open, and draining must not wait for it.
    in_flight = InFlight("gateway", own.max_message_bytes, own.max_receiving_bytes)
    try:
        await door.listen(health, in_flight)
        door.open(scaler_handlers(Load(_METRIC, _TARGET, _DEFAULT_TARGET, count, is_active, _LOOK_EVERY_S)))
        yield
    finally:
        await door.stop(0)
