"""A gateway with its stages, each in this process or behind a target. Both kinds are called as functions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from neuronpipe.bulk.jobs.door import JOB_SERVICES, running_jobs
from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.assembly import INFERENCE_SERVICES, GatewayDoors, Protocols, gateway_protocols
from neuronpipe.doors.registry import REGISTRY_SERVICE, registry_handlers
from neuronpipe.doors.scaler import running_scaler
from neuronpipe.gateway.access import Access, access_by
from neuronpipe.gateway.assembly import Gateway, running_pipeline
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.routing import VersionRouter
from neuronpipe.gateway.settings import NEAR
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.health import HealthBoard
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
    """Runs inference and jobs, and yields the function that opens the doors. Raises SetupError."""
    inference, own = _Inference(settings, telemetry, access, life.health), settings.gateway
    async with (
        inference.running() as gateway,
        running_jobs(
            settings=settings.jobs,
            pipeline=own.pipeline,
            http=own.http,
            gateway=gateway,
            tenants=access.tenants,
            life=life,
        ) as jobs,
    ):
        life.on_draining(inference.held_items.stop)
        life.in_flight.add_check(gateway.pipeline.check_room)
        protocols = gateway_protocols(
            gateway,
            own,
            models=settings.models,
            tenants=access.tenants,
            telemetry=telemetry,
            grpc_port=doors.grpc.port,
            health=life.health,
            targets=list(own.far_targets.values()),
            stage_tls=inference.stage_tls,
        )
        registry = Protocols(registry_handlers(settings.models, access.tenants) if own.registry_service else [])
        async with running_scaler(own.scaler_listen, settings.process, gateway, life.health):
            yield partial(doors.open, protocols, jobs, registry)


class _Inference:
    """The stages of a process, near or far, and the pipeline over them.

    Inference is healthy while all far stages are reached, or while requests are held for them.
    """

    def __init__(
        self, settings: PipelineProcessSettings, telemetry: Telemetry, access: Access, health: HealthBoard
    ) -> None:
        self._settings, self._telemetry, self._access, self._health = settings, telemetry, access, health
        self.held_items = HeldItems(settings.gateway.max_held_requests, meters=telemetry.meters)
        files = settings.gateway.stage_tls.files(settings.tls)
        self.stage_tls = watched_tls(files, "client") if files else None
        self._reached: dict[str, bool] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        """Loads the models, and yields the pipeline and the models for the doors. Raises SetupError."""
        settings, telemetry, tenants = self._settings, self._telemetry, self._access.tenants
        own = settings.gateway
        repository = await run_apart(live_repository, settings.models, with_artifacts=own.executor_target == NEAR)
        bundles = await run_apart(repository.bundles)
        if self.stage_tls:
            show_tls(telemetry.meters, "client", self.stage_tls)
        async with (
            running_stages(settings, telemetry, self._report, bundles, self.stage_tls, self.held_items) as stages,
            self._access.kept_up_to_date(),
            running_pipeline(
                stages.functions,
                own.pipeline,
                own.results,
                telemetry=telemetry,
                bundles=bundles,
                tenants=tenants,
                held_items=self.held_items,
                redis=settings.redis,
            ) as (models, pipeline),
            running_live_models(repository, [*stages.near, models], telemetry.meters) as live,
        ):
            yield Gateway(pipeline, Catalog(models, tenants, VersionRouter(live, models, stages.near, stages.far)))

    def _report(self, stage: str, is_reached: bool) -> None:
        self._health.set(stage, is_reached)
        if not stage:  # the process itself, which still answers requests
            return
        self._reached[stage] = is_reached
        for service in INFERENCE_SERVICES:
            self._health.set(service, self.held_items.is_on or all(self._reached.values()))


def services_of(settings: PipelineProcessSettings) -> list[str]:
    """Returns the gRPC services in addition to inference: jobs, and the registry if callers may change it."""
    return [*JOB_SERVICES, *([REGISTRY_SERVICE.full_name] if settings.gateway.registry_service else [])]
