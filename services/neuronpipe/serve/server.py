"""A gateway with its stages, each in this process or behind a target. Both kinds are called as functions."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from neuronpipe.bulk.jobs.door import JOB_SERVICES, running_jobs
from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.assembly import INFERENCE_SERVICES, GatewayDoors, Protocols, gateway_protocols, running_scaler
from neuronpipe.doors.registry import REGISTRY_SERVICE, registry_handlers
from neuronpipe.gateway.access import Access, access_by
from neuronpipe.gateway.assembly import Gateway, PipelineSetup, running_pipeline
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.routing import VersionRouter
from neuronpipe.gateway.settings import NEAR
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.tls import ServerTls, show_tls, watched_tls
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.serve.stages import running_stages


async def run(settings: PipelineProcessSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    process, meters = settings.process, telemetry.meters
    access = access_by(settings.gateway, process, settings.tls, settings.redis, telemetry)
    with telemetry.metrics_port(access.may_read_metrics):
        if isinstance(settings, AllSettings) and settings.front_processes:
            from neuronpipe.serve.fronts import run_fronted

            await run_fronted(settings, telemetry, access)
            return
        gateway_settings, services = settings.gateway, services_of(settings)
        doors = GatewayDoors(process, gateway_settings, telemetry, tls, access.guard, further_services=services)
        assemble = partial(running_gateway, settings, telemetry, access, doors)
        await serve(settings.service, process, doors.all, assemble, meters, idle_exit_s=settings.idle_exit_s)


@asynccontextmanager
async def running_gateway(
    settings: PipelineProcessSettings, telemetry: Telemetry, access: Access, doors: GatewayDoors, life: Life
) -> AsyncIterator[OpenDoors]:
    """Runs the pipeline, and yields the function that opens the doors. Raises SetupError.

    Inference is healthy while all far stages are reached, or while requests are held for them.
    """
    gateway_settings, meters, tenants = settings.gateway, telemetry.meters, access.tenants
    repository = await run_apart(
        live_repository, settings.models, with_artifacts=gateway_settings.executor_target == NEAR
    )
    bundles = await run_apart(repository.bundles)
    stage_tls = watched_tls(files, "client") if (files := gateway_settings.stage_tls.files(settings.tls)) else None
    if stage_tls:
        show_tls(meters, "client", stage_tls)
    held_items = HeldItems(gateway_settings.max_held_requests, meters=meters)
    reached: dict[str, bool] = {}

    def report(stage: str, is_reached: bool) -> None:
        life.health.set(stage, is_reached)
        if not stage:  # the process itself, which still answers requests
            return
        reached[stage] = is_reached
        for service in INFERENCE_SERVICES:
            life.health.set(service, held_items.is_on or all(reached.values()))

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stages = await enter(
            running_stages(settings, telemetry, report, bundles=bundles, tls=stage_tls, held_items=held_items)
        )
        await enter(access.kept_up_to_date())
        setup = PipelineSetup(
            settings=gateway_settings.pipeline,
            results=gateway_settings.results,
            telemetry=telemetry,
            tenants=tenants,
            bundles=bundles,
            held_items=held_items,
            redis=settings.redis,
        )
        models, pipeline = await enter(running_pipeline(stages.functions, setup))
        live = await enter(running_live_models(repository, [*stages.near, models], meters))
        gateway = Gateway(pipeline, Catalog(models, tenants, VersionRouter(live, models, stages.near, stages.far)))
        jobs = await enter(
            running_jobs(
                settings=settings.jobs,
                pipeline=gateway_settings.pipeline,
                http=gateway_settings.http,
                gateway=gateway,
                tenants=tenants,
                life=life,
            )
        )
        life.on_draining(held_items.stop)
        life.in_flight.add_check(pipeline.check_room)
        protocols = gateway_protocols(
            gateway,
            gateway_settings,
            models=settings.models,
            tenants=tenants,
            telemetry=telemetry,
            grpc_port=doors.grpc.port,
            health=life.health,
            targets=list(gateway_settings.far_targets.values()),
            stage_tls=stage_tls,
        )
        registry = Protocols(registry_handlers(settings.models, tenants) if gateway_settings.registry_service else [])
        await enter(running_scaler(gateway_settings.scaler_listen, settings.process, gateway, life.health))
        yield partial(doors.open, protocols, jobs, registry)


def services_of(settings: PipelineProcessSettings) -> list[str]:
    """Returns the gRPC services in addition to inference: jobs, and the registry if callers may change it."""
    return [*JOB_SERVICES, *([REGISTRY_SERVICE.full_name] if settings.gateway.registry_service else [])]
