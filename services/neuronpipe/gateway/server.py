"""The gateway as a process of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.assembly import running_gateway
from neuronpipe.gateway.doors.assembly import gateway_doors, gateway_handlers
from neuronpipe.gateway.doors.native import INFERENCE_SERVICE
from neuronpipe.gateway.far_stages import running_far_stages
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.process.door import Handler
from neuronpipe.process.life import Life, serve


async def run(settings: GatewaySettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM. InferenceService is healthy while all three stages are, each of which has its health by its name, too."""
    targets = [settings.tokenizer_target, settings.executor_target, settings.postprocessor_target]

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        bundles = read_repository(settings.repository)
        reached: dict[str, bool] = {}

        def report(stage: str, is_reached: bool) -> None:
            reached[stage] = is_reached
            life.health.set(stage, is_reached)
            life.health.set(INFERENCE_SERVICE.full_name, all(reached.values()))

        async with (
            running_far_stages(settings, telemetry.meters, report) as stages,
            running_gateway(bundles, stages, settings, settings, telemetry) as gateway,
        ):
            life.in_flight.check_room = gateway.pipeline.check_room
            yield gateway_handlers(gateway, settings, settings, telemetry, targets)

    await serve("gateway", settings, gateway_doors(settings, settings, telemetry), assemble)
