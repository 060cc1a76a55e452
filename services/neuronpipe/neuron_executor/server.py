"""The neuron-executor as a process of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import NeuronExecutorSettings
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.rpc.server import Method, SetServing, serve


async def run(settings: NeuronExecutorSettings) -> None:
    """Serves until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        async with running_executor(read_repository(settings.repository), settings) as stage:
            yield {"Execute": lambda request, context: stage.execute(request)}

    await serve("neuron-executor", settings, [stages_pb2.DESCRIPTOR.services_by_name["NeuronExecutorService"]], assemble)
