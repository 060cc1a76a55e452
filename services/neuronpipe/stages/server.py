"""A stage as a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.process.settings import StageSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE, StageRpc, stage_method
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs
from neuronpipe.stages.settings import NeuronExecutorSettings, TokenizerSettings


async def run(settings: StageSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves the stage of the settings until SIGTERM, the neuron-executor also until a device has no core left.

    Raises SetupError.
    """
    rpc, running, name = _stage_of(settings, telemetry)
    is_executor = rpc is EXECUTE

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        repository = await asyncio.to_thread(live_repository, settings, with_artifacts=is_executor)
        known = {"known": await asyncio.to_thread(repository.bundles)} if is_executor else {}
        async with (
            running([], **known) as stage,
            running_live_models(repository, [stage.models], telemetry.meters),
        ):
            method = stage_method(
                rpc,
                getattr(stage, name),
                telemetry,
                models=stage.models,
                max_message_bytes=settings.max_message_bytes,
                leaves_unavailable=is_executor,
            )
            yield {rpc.path: method} | trace_handlers(telemetry.traces)

    door = GrpcDoor(settings, [rpc, *trace_rpcs(telemetry.traces)], tls, allowed_peers=settings.allowed_names)
    await serve(rpc.service_name, settings, [door], assemble, telemetry.meters)


def _stage_of(
    settings: StageSettings, telemetry: Telemetry
) -> tuple[StageRpc, Callable[..., AbstractAsyncContextManager[Any]], str]:
    """The rpc of a stage, what runs it, and the name of its function. Only its own libraries need to be installed."""
    if isinstance(settings, TokenizerSettings):
        from neuronpipe.stages.tokenizer.stage import running_tokenizer

        return TOKENIZE, partial(running_tokenizer, settings=settings, telemetry=telemetry), "tokenize"
    if isinstance(settings, NeuronExecutorSettings):
        from neuronpipe.stages.neuron_executor.stage import running_executor

        return EXECUTE, partial(running_executor, settings=settings, telemetry=telemetry), "execute"
    from neuronpipe.stages.postprocessor.stage import running_postprocessor

    return POSTPROCESS, running_postprocessor, "postprocess"
