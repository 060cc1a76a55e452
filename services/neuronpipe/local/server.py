"""A gateway with its stages, which are called as functions whether they are in this process or not."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from neuronpipe.bundles.live import LiveRepository, running_live_models
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.access import Access, access_by
from neuronpipe.gateway.assembly import running_gateway
from neuronpipe.gateway.doors.assembly import INFERENCE_SERVICES, gateway_doors, gateway_handlers
from neuronpipe.gateway.routing import Router
from neuronpipe.jobs.door import JOBS, running_jobs
from neuronpipe.local.settings import AllSettings, PipelineProcessSettings
from neuronpipe.local.stages import running_stages
from neuronpipe.process.door import Door, Handler
from neuronpipe.process.life import Life, serve
from neuronpipe.tls.files import watched_tls
from neuronpipe.tls.server import ServerTls
from neuronpipe.tls.telemetry import show_tls


async def run(settings: PipelineProcessSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves the gateway's API until SIGTERM."""
    access = access_by(settings, telemetry)
    if isinstance(settings, AllSettings) and settings.front_processes:
        from neuronpipe.local.fronted import run_fronted

        await run_fronted(settings, telemetry, access)
        return
    doors = gateway_doors(settings, settings, telemetry, tls, access.guard, addition=JOBS)
    assemble = partial(running_pipeline, settings, telemetry, access, doors)
    await serve(settings.service, settings, doors, assemble, telemetry.meters)


@asynccontextmanager
async def running_pipeline(
    settings: PipelineProcessSettings, telemetry: Telemetry, access: Access, doors: Sequence[Door], life: Life
) -> AsyncIterator[Mapping[str, Handler]]:
    """The handlers of the doors. What runs models is healthy while all far stages are reached. Raises SetupError."""
    repository = LiveRepository.of(settings)
    known = repository.bundles()
    stage_tls = watched_tls(files, "client") if (files := settings.stage_tls_files) else None
    if stage_tls:
        show_tls(telemetry.meters, "client", stage_tls)
    reached: dict[str, bool] = {}

    def report(stage: str, is_reached: bool) -> None:
        reached[stage] = is_reached
        life.health.set(stage, is_reached)
        for service in INFERENCE_SERVICES:
            life.health.set(service, all(reached.values()))

    async with (
        running_stages([], settings, telemetry, report, stage_tls, known) as stages,
        access.kept_up_to_date(),
        running_gateway([], stages.functions, settings, settings, telemetry, access.tenants, known) as gateway,
        running_live_models(repository, [*stages.near, gateway.catalog.models], telemetry.meters) as live,
        running_jobs(settings, settings, settings, gateway, access.tenants) as jobs,
    ):
        gateway.catalog.router = Router(live, gateway.catalog.models, stages.near, stages.far)
        life.in_flight.check_room = gateway.pipeline.check_room
        targets = list(settings.far_targets.values())
        yield gateway_handlers(gateway, settings, settings, telemetry, doors, life.health, targets, stage_tls) | jobs
