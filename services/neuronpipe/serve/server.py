"""A gateway with its stages, each near or far by its target, which are called as functions in either case."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from neuronpipe.bulk.jobs.door import JOBS, running_jobs
from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.assembly import INFERENCE_SERVICES, Addition, gateway_doors, gateway_handlers, running_scaler
from neuronpipe.doors.registry import registry_handlers, registry_rpcs
from neuronpipe.gateway.access import Access, access_by
from neuronpipe.gateway.assembly import running_gateway
from neuronpipe.gateway.holding import Holding
from neuronpipe.gateway.routing import Router
from neuronpipe.gateway.settings import NEAR
from neuronpipe.platform.process.door import Door, Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.tls import ServerTls, show_tls, watched_tls
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.serve.stages import running_stages


async def run(settings: PipelineProcessSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves the gateway's API until SIGTERM."""
    access = access_by(settings, telemetry)
    if isinstance(settings, AllSettings) and settings.front_processes:
        from neuronpipe.serve.fronts import run_fronted

        await run_fronted(settings, telemetry, access)
        return
    doors = gateway_doors(settings, telemetry, tls, access.guard, addition=additions_of(settings))
    assemble = partial(running_pipeline, settings, telemetry, access, doors)
    await serve(settings.service, settings, doors, assemble, telemetry.meters, idle_exit_s=settings.idle_exit_s)


@asynccontextmanager
async def running_pipeline(
    settings: PipelineProcessSettings, telemetry: Telemetry, access: Access, doors: Sequence[Door], life: Life
) -> AsyncIterator[Mapping[str, Handler]]:
    """The handlers of the doors. Inference is healthy while far stages are reached or held for. Raises SetupError."""
    repository = live_repository(settings, with_artifacts=settings.executor_target == NEAR)
    known = repository.bundles()
    stage_tls = watched_tls(files, "client") if (files := settings.stage_tls_files) else None
    if stage_tls:
        show_tls(telemetry.meters, "client", stage_tls)
    holding = Holding(settings.max_held_requests, settings.max_held_bytes, telemetry.meters)
    reached: dict[str, bool] = {}

    def report(stage: str, is_reached: bool) -> None:
        reached[stage] = is_reached
        life.health.set(stage, is_reached)
        for service in INFERENCE_SERVICES:
            life.health.set(service, holding.is_on or all(reached.values()))

    async with (
        running_stages([], settings, telemetry, report, stage_tls, known, holding) as stages,
        access.kept_up_to_date(),
        running_gateway([], stages.functions, settings, settings, telemetry, access.tenants, known, holding) as gateway,
        running_live_models(repository, [*stages.near, gateway.catalog.models], telemetry.meters) as live,
        running_jobs(settings, settings, settings, gateway, access.tenants, life) as jobs,
    ):
        gateway.catalog.router = Router(live, gateway.catalog.models, stages.near, stages.far)
        life.on_draining(holding.stop)
        life.in_flight.check_room = gateway.pipeline.check_room
        targets = list(settings.far_targets.values())
        own = gateway_handlers(gateway, settings, access.tenants, telemetry, doors, life.health, targets, stage_tls)
        async with running_scaler(settings, gateway, life.health):
            yield own | jobs | registry_handlers(settings, access.tenants)


def additions_of(settings: PipelineProcessSettings) -> Addition:
    """What the doors take besides inference: jobs, and the registry if it may be changed."""
    return replace(JOBS, rpcs=(*JOBS.rpcs, *registry_rpcs(settings)))
