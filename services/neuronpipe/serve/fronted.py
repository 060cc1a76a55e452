"""The whole pipeline as one executor, in this process, and several front processes at one address."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.logs import log
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.access import Access
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import EXECUTE, stage_method
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs
from neuronpipe.serve.fronts import Fronts, shared_port
from neuronpipe.serve.settings import AllSettings
from neuronpipe.stages.neuron_executor.stage import NeuronExecutorStage, running_executor
from neuronpipe.stages.settings import EngineSettings


async def run_fronted(settings: AllSettings, telemetry: Telemetry, access: Access) -> None:
    """Serves until SIGTERM, or until the executor cannot go on. `access`: here of the metrics alone; each front process
    has its own. Raises SetupError.
    """

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        repository = live_repository(settings, with_artifacts=True)
        with (
            shared_port(settings.listen) as port,
            shared_port(settings.http_listen) as http_port,
            TemporaryDirectory(prefix="neuronpipe-") as folder,
        ):
            executor = f"unix:{folder}/executor.sock"
            given = _front_settings(settings, port.address, http_port.address, executor)
            fronts = Fronts(settings.front_processes, given, [port, http_port])
            telemetry.meters.add_others = fronts.metrics.add_to
            life.on_draining(fronts.drain)
            async with (
                access.kept_up_to_date(shares_budgets=False),
                running_executor([], settings, telemetry, repository.bundles()) as stage,
                running_live_models(repository, [stage.models], telemetry.meters),
                _executor_door(stage, settings, telemetry, executor, life),
                fronts.running(),
            ):
                await fronts.open()
                log("listening", address=port.address)
                if http_port.address:
                    log("listening for HTTP", address=http_port.address)
                yield {}

    await serve(settings.service, settings, [], assemble, telemetry.meters)


def _front_settings(settings: AllSettings, listen: str, http_listen: str, executor_target: str) -> dict[str, Any]:
    """What a front process gets: all settings but the executor's and those of the service as a whole."""
    of_executor = {name: field.default for name, field in EngineSettings.model_fields.items()}
    of_service = {"front_processes": 0, "metrics_listen": ""}
    addresses = {"listen": listen, "http_listen": http_listen, "executor_target": executor_target}
    return settings.model_dump(mode="json") | of_executor | of_service | addresses


@asynccontextmanager
async def _executor_door(
    stage: NeuronExecutorStage, settings: AllSettings, telemetry: Telemetry, listen: str, life: Life
) -> AsyncIterator[None]:
    """Takes the items of front processes."""
    private = settings.model_copy(update={"listen": listen, "max_connection_age_s": 0.0, "max_stream_idle_s": 0.0})
    door = GrpcDoor(private, [EXECUTE, *trace_rpcs(telemetry.traces)], event="listening for front processes")
    method = stage_method(
        EXECUTE, stage.execute, telemetry, models=stage.models, max_message_bytes=settings.max_message_bytes
    )
    try:
        await door.listen(life.health, life.in_flight)
        door.open({EXECUTE.path: method} | trace_handlers(telemetry.traces))
        yield
    finally:
        await door.stop(0)
