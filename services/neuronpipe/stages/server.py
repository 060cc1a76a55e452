"""A stage as a process of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from neuronpipe.bundles.folder_repository import LiveRepository
from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.served import ServedModels
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry, all_may_read
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.process.settings import StageSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE, StageMethod, StageRpc
from neuronpipe.rpc.trace_service import trace_handlers, trace_services
from neuronpipe.stages.settings import NeuronExecutorSettings, TokenizerSettings


@dataclass(frozen=True, slots=True)
class RunningStage:
    """A stage without models yet: the table of its models, and its functions; see StageMethod."""

    models: ServedModels[Any]
    run: Callable[..., Awaitable[Any]]
    run_at_once: Callable[[Any], Any] | None = None


# Runs a stage, which may get the models of the repository. The function gets whether the process is well.
_Running: TypeAlias = Callable[[LiveRepository, Callable[[bool], None]], AbstractAsyncContextManager[RunningStage]]


async def run(settings: StageSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves the stage of the settings until SIGTERM, the neuron-executor also until a device has no core left.

    Raises SetupError.
    """
    rpc, running = _stage_of(settings, telemetry)
    is_executor = rpc is EXECUTE
    services = [rpc.service, *trace_services(telemetry.traces)]
    door = GrpcDoor(settings.process, services, tls, allowed_peers=settings.allowed_names)

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        repository = await run_apart(live_repository, settings.models, with_artifacts=is_executor)
        async with (
            running(repository, partial(life.health.set, "")) as stage,
            running_live_models(repository, [stage.models], telemetry.meters),
        ):
            method = StageMethod(
                rpc,
                stage.run,
                telemetry,
                at_once=stage.run_at_once,
                models=stage.models,
                max_message_bytes=settings.process.max_message_bytes,
                leaves_unavailable=is_executor,
                in_flight=life.in_flight,
            )
            yield partial(door.open, [(rpc, method), *trace_handlers(telemetry.traces)])

    with telemetry.metrics_port(all_may_read):
        await serve(rpc.service_name, settings.process, [door], assemble, telemetry.meters)


def _stage_of(settings: StageSettings, telemetry: Telemetry) -> tuple[StageRpc, _Running]:
    """Returns the rpc of a stage, and the function that runs it. Imports only this stage's libraries."""
    if isinstance(settings, TokenizerSettings):
        from neuronpipe.stages.tokenizer.stage import running_tokenizer

        @asynccontextmanager
        async def tokenizer(repository: LiveRepository, report: Callable[[bool], None]) -> AsyncIterator[RunningStage]:
            async with running_tokenizer([], settings.tokenizer, telemetry, settings.redis) as stage:
                yield RunningStage(stage.models, stage.tokenize)

        return TOKENIZE, tokenizer
    if isinstance(settings, NeuronExecutorSettings):
        from neuronpipe.stages.neuron_executor.stage import running_executor

        @asynccontextmanager
        async def executor(repository: LiveRepository, report: Callable[[bool], None]) -> AsyncIterator[RunningStage]:
            bundles = await run_apart(repository.bundles)
            async with running_executor([], settings.executor, telemetry, bundles, report) as stage:
                yield RunningStage(stage.models, stage.execute)

        return EXECUTE, executor
    from neuronpipe.stages.postprocessor.stage import running_postprocessor

    @asynccontextmanager
    async def postprocessor(repository: LiveRepository, report: Callable[[bool], None]) -> AsyncIterator[RunningStage]:
        async with running_postprocessor([]) as stage:
            yield RunningStage(stage.models, stage.postprocess, stage.postprocess_at_once)

    return POSTPROCESS, postprocessor
