"""The whole pipeline in one process: the same stages, called as functions."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.config import AllSettings, EngineSettings, TokenCacheSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Stages
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.results import running_result_cache
from neuronpipe.gateway.server import INFERENCE_SERVICE, MODEL_SERVICE, gateway_methods
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.postprocessor.stage import PostprocessorStage
from neuronpipe.rpc.server import Method, SetServing, serve
from neuronpipe.tokenizer.stage import running_tokenizer


@asynccontextmanager
async def local_stages(
    bundles: list[Bundle], engine: EngineSettings, token_cache: TokenCacheSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[Stages]:
    """The stages in this process, loaded and warmed up. Raises SetupError."""
    async with running_executor(bundles, engine, telemetry) as executor, running_tokenizer(bundles, token_cache, telemetry) as tokenizer:
        postprocessor = PostprocessorStage(bundles)
        try:
            yield Stages(tokenize=tokenizer.tokenize, execute=executor.execute, postprocess=postprocessor.postprocess)
        finally:
            postprocessor.close()


async def run(settings: AllSettings, telemetry: Telemetry) -> None:
    """Serves the gateway's API from one process until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        bundles = read_repository(settings.repository)
        async with (
            local_stages(bundles, settings, settings, telemetry) as stages,
            running_result_cache(bundles, settings, telemetry) as results,
        ):
            models = ModelTable({bundle.key: bundle.spec for bundle in bundles})
            yield gateway_methods(Pipeline(models, stages, settings, telemetry, results), Catalog(bundles))

    await serve("all", settings, [INFERENCE_SERVICE, MODEL_SERVICE], assemble, traces=telemetry.traces)
