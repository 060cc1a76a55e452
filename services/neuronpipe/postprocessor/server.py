"""The postprocessor as a process of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import PostprocessorSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.postprocessor.stage import PostprocessorStage
from neuronpipe.rpc.items import POSTPROCESS, stage_method
from neuronpipe.rpc.server import Method, SetServing, serve


async def run(settings: PostprocessorSettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        stage = PostprocessorStage(read_repository(settings.repository))
        try:
            yield stage_method(POSTPROCESS, stage.postprocess, telemetry)
        finally:
            stage.close()

    await serve("postprocessor", settings, [POSTPROCESS.service], assemble, traces=telemetry.traces)
