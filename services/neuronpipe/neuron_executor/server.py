"""The neuron-executor as a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.api.v1.stages_pb2 import ExecuteItem, Prediction
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import NeuronExecutorSettings
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.stages import Execute
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.rpc.items import EXECUTE, stage_method
from neuronpipe.rpc.server import Method, SetServing, serve


async def run(settings: NeuronExecutorSettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM, or until a model has no core left."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        async with running_executor(read_repository(settings.repository), settings, telemetry) as stage:
            yield stage_method(EXECUTE, _for_another_to_answer(stage.execute), telemetry)

    await serve("neuron-executor", settings, [EXECUTE.service], assemble, traces=telemetry.traces)


def _for_another_to_answer(execute: Execute) -> Execute:
    """Leaves unanswered what this process cannot do any more, since it ends.

    With its stream the gateway knows, and sends the item to another executor, or tells the caller UNAVAILABLE where there is none.
    """

    async def answer(item: ExecuteItem) -> Prediction:
        try:
            return await execute(item)
        except Unavailable:
            await asyncio.Event().wait()  # until the stream is cut
            raise

    return answer
