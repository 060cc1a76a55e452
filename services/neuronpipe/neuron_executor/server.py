"""The neuron-executor as a process of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import NeuronExecutorSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.rpc.items import EXECUTE, stage_method
from neuronpipe.rpc.server import Method, SetServing, serve


async def run(settings: NeuronExecutorSettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM, or until a model has no core left."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        async with running_executor(read_repository(settings.repository), settings, telemetry) as stage:
            yield stage_method(EXECUTE, stage.execute, telemetry, leaves_unavailable=True)

    await serve("neuron-executor", settings, [EXECUTE.service], assemble, traces=telemetry.traces)
