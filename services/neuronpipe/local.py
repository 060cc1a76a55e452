"""The whole pipeline in one process: the same stages, called as functions."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.config import AllSettings, EngineSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Stages
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.server import INFERENCE_SERVICE, MODEL_SERVICE, gateway_methods
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.postprocessor.stage import PostprocessorStage
from neuronpipe.rpc.server import Method, SetServing, serve
from neuronpipe.tokenizer.stage import TokenizerStage


@asynccontextmanager
async def local_stages(bundles: list[Bundle], settings: EngineSettings, telemetry: Telemetry | None = None) -> AsyncIterator[Stages]:
    """The stages in this process, loaded and warmed up. Raises SetupError."""
    async with running_executor(bundles, settings, telemetry) as executor:
        tokenizer = await asyncio.to_thread(TokenizerStage, bundles)
        postprocessor = PostprocessorStage(bundles)
        try:
            yield Stages(tokenize=tokenizer.tokenize, execute=executor.execute, postprocess=postprocessor.postprocess)
        finally:
            tokenizer.close()
            postprocessor.close()


async def run(settings: AllSettings, telemetry: Telemetry) -> None:
    """Serves the gateway's API from one process until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        bundles = read_repository(settings.repository)
        async with local_stages(bundles, settings, telemetry) as stages:
            models = ModelTable({bundle.key: bundle.spec for bundle in bundles})
            yield gateway_methods(Pipeline(models, stages, settings, telemetry), Catalog(bundles))

    await serve("all", settings, [INFERENCE_SERVICE, MODEL_SERVICE], assemble, traces=telemetry.traces)
