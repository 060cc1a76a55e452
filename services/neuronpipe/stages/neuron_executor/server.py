"""The neuron-executor as a process of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.items import EXECUTE
from neuronpipe.rpc.stage_server import OpenedStage, serve_stage
from neuronpipe.stages.neuron_executor.settings import NeuronExecutorSettings
from neuronpipe.stages.neuron_executor.stage import running_executor


async def run(settings: NeuronExecutorSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves until SIGTERM, or until a device has no core left."""

    @asynccontextmanager
    async def open_stage() -> AsyncIterator[OpenedStage]:
        repository = await asyncio.to_thread(live_repository, settings, with_artifacts=True)
        known = await asyncio.to_thread(repository.bundles)
        async with (
            running_executor([], settings, telemetry, known) as stage,
            running_live_models(repository, [stage.models], telemetry.meters),
        ):
            yield stage.execute, stage.models

    await serve_stage(EXECUTE, settings, telemetry, open_stage, tls, leaves_unavailable=True)
