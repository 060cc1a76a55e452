"""The port of KEDA's external scaler, which asks a gateway for its number of requests."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.gateway.assembly import Gateway
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import SCALER, ScaledLoad, scaler_handlers

# The metric of KEDA's external scaler: the requests of the gateway, held requests included.
_METRIC = "neuronpipe-requests"
# Key of a KEDA trigger's metadata: the target of requests in flight per pod.
_TARGET = "requestsPerPod"
# The largest batch of an executor, by default.
_DEFAULT_TARGET = 32.0
_LOOK_EVERY_S = 0.2
# Seconds without a request after which no stage is needed. KEDA also waits for its cooldownPeriod.
_IDLE_S = 30.0


@asynccontextmanager
async def running_scaler(
    listen: str, process: ProcessSettings, gateway: Gateway, health: HealthBoard
) -> AsyncIterator[None]:
    """Listens for KEDA while the block runs. `listen`: empty for no port. Raises SetupError.

    The port is for KEDA alone: callers need no credentials there and learn only the number of requests.
    """
    if not listen:
        yield
        return

    control = gateway.pipeline.admission_control

    async def count() -> int:
        return control.in_flight[0]

    async def is_active() -> bool:
        return bool(control.in_flight[0]) or time.monotonic() < control.last_s + _IDLE_S

    scaler_settings = process.model_copy(update={"listen": listen, "max_connection_age_s": 0.0})
    door = GrpcDoor(scaler_settings, [SCALER.full_name], option="--scaler-listen", event="listening for KEDA")
    # The scaler has its own count of calls: KEDA keeps a stream open, and draining must not wait for it.
    in_flight = InFlight("gateway", scaler_settings.max_message_bytes, scaler_settings.max_receiving_bytes)
    try:
        await door.listen(health, in_flight)
        load = ScaledLoad(
            _METRIC, _TARGET, _DEFAULT_TARGET, count=count, is_active=is_active, look_every_s=_LOOK_EVERY_S
        )
        door.open(scaler_handlers(load))
        yield
    finally:
        await door.stop(0)
