"""KEDA's external scaler for the stages of a gateway, which are needed while it has requests, held ones included."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.gateway.admission import Gate
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import Load, scaler_handlers, scaler_rpcs

_METRIC = "neuronpipe-requests"
# Of a trigger: requests in flight for one pod.
_TARGET = "requestsPerPod"
# The largest batch of an executor, by default.
_DEFAULT_TARGET = 32.0
_LOOK_EVERY_S = 0.2


@asynccontextmanager
async def running_scaler(settings: GatewaySettings, gate: Gate, health: HealthBoard) -> AsyncIterator[None]:
    """Listens for KEDA while the block runs, at a port of its own: callers show nothing there, and learn of nothing but
    the number of requests. Raises SetupError.
    """
    if not settings.scaler_listen:
        yield
        return

    async def count() -> int:
        return gate.in_flight[0]

    async def is_active() -> bool:
        return bool(gate.in_flight[0]) or time.monotonic() < gate.last_s + settings.scaler_idle_s

    unlimited = {"max_connection_age_s": 0.0, "max_stream_idle_s": 0.0}
    own = settings.model_copy(update={"listen": settings.scaler_listen, **unlimited})
    door = GrpcDoor(own, scaler_rpcs(), event="listening for KEDA")
    # Counted by itself: KEDA keeps a stream open, and draining must not wait for it.
    in_flight = InFlight("gateway", own.max_message_bytes, own.max_receiving_bytes)
    try:
        await door.listen(health, in_flight)
        door.open(scaler_handlers(Load(_METRIC, _TARGET, _DEFAULT_TARGET, count, is_active, _LOOK_EVERY_S)))
        yield
    finally:
        await door.stop(0)
