"""A stage as a process of its own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from neuronpipe.bundles.live import running_live_models
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


async def run(settings: StageSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves the stage of the settings until SIGTERM, the neuron-executor also until a device has no core left.

    Raises SetupError.
    """
    rpc, running, name = _stage_of(settings, telemetry)
    is_executor = rpc is EXECUTE
    services = [rpc.service, *trace_services(telemetry.traces)]
    door = GrpcDoor(settings.process, services, tls, allowed_peers=settings.allowed_names)

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        repository = await run_apart(live_repository, settings.models, with_artifacts=is_executor)
        arguments: dict[str, Any] = {}
        if is_executor:
            arguments = {"known": await run_apart(repository.bundles), "report": partial(life.health.set, "")}
        async with (
            running([], **arguments) as stage,
            running_live_models(repository, [stage.models], telemetry.meters),
        ):
            method = StageMethod(
                rpc,
                getattr(stage, name),
                telemetry,
                at_once=getattr(stage, f"{name}_at_once", None),
                models=stage.models,
                max_message_bytes=settings.process.max_message_bytes,
                leaves_unavailable=is_executor,
                in_flight=life.in_flight,
            )
            yield partial(door.open, [(rpc, method), *trace_handlers(telemetry.traces)])

    with telemetry.metrics_port(all_may_read):
        await serve(rpc.service_name, settings.process, [door], assemble, telemetry.meters)


def _stage_of(
    settings: StageSettings, telemetry: Telemetry
) -> tuple[StageRpc, Callable[..., AbstractAsyncContextManager[Any]], str]:
    """The rpc of a stage, its context manager, and the name of its function. Imports only this stage's libraries."""
    if isinstance(settings, TokenizerSettings):
        from neuronpipe.stages.tokenizer.stage import running_tokenizer

        running = partial(running_tokenizer, settings=settings.tokenizer, telemetry=telemetry, redis=settings.redis)
        return TOKENIZE, running, "tokenize"
    if isinstance(settings, NeuronExecutorSettings):
        from neuronpipe.stages.neuron_executor.stage import running_executor

        return EXECUTE, partial(running_executor, settings=settings.executor, telemetry=telemetry), "execute"
    from neuronpipe.stages.postprocessor.stage import running_postprocessor

    return POSTPROCESS, running_postprocessor, "postprocess"
