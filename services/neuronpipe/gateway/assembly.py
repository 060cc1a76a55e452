"""Assembles the parts of a gateway that all of its doors use, over local or remote stages."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import running_models
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.admission import Gate
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.holding import Holding
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.results import kept_results, running_result_cache
from neuronpipe.gateway.routing import open_gateway_models
from neuronpipe.gateway.settings import GatewaySettings, PipelineSettings, ResultCacheSettings, parse_aliases
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import Load, scaler_handlers, scaler_rpcs


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts that every door gets: one pipeline for all, and the served models."""

    pipeline: Pipeline
    catalog: Catalog


@asynccontextmanager
async def running_gateway(
    bundles: list[Bundle],
    stages: Stages,
    settings: PipelineSettings,
    results: ResultCacheSettings,
    telemetry: Telemetry,
    tenants: Tenants | None = None,
    known: Sequence[Bundle] = (),
    holding: Holding | None = None,
) -> AsyncIterator[Gateway]:
    """The gateway of these models. `tenants`: None where callers have no names. `known`: bundles that will be opened
    later. `holding`: that of its stages. Raises SetupError.
    """
    keeps_results = kept_results([*bundles, *known], results)
    async with AsyncExitStack() as stack:
        cache = None
        if any(map(keeps_results, (*bundles, *known))):
            cache = await stack.enter_async_context(running_result_cache(results, telemetry))
        models = open_gateway_models(telemetry.meters, keeps_results, parse_aliases(settings.model_aliases))
        await stack.enter_async_context(running_models(models, bundles))
        pipeline = Pipeline(models, stages, settings, telemetry, cache, tenants, holding)
        await stack.enter_async_context(pipeline.copies.running())
        yield Gateway(pipeline, Catalog(models, tenants))


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
