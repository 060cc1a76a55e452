"""The whole pipeline in one process: the same stages, called as functions."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.assembly import running_gateway
from neuronpipe.gateway.doors.assembly import gateway_doors, gateway_handlers
from neuronpipe.local.settings import AllSettings
from neuronpipe.neuron_executor.settings import EngineSettings
from neuronpipe.neuron_executor.stage import running_executor
from neuronpipe.postprocessor.stage import running_postprocessor
from neuronpipe.process.door import Handler
from neuronpipe.process.life import Life, serve
from neuronpipe.tokenizer.settings import TokenCacheSettings
from neuronpipe.tokenizer.stage import running_tokenizer


@asynccontextmanager
async def local_stages(
    bundles: list[Bundle], engine: EngineSettings, token_cache: TokenCacheSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[Stages]:
    """The stages in this process, loaded and warmed up. Raises SetupError."""
    async with (
        running_executor(bundles, engine, telemetry) as executor,
        running_tokenizer(bundles, token_cache, telemetry) as tokenizer,
        running_postprocessor(bundles) as postprocessor,
    ):
        yield Stages(tokenizer.tokenize, executor.execute, postprocessor.postprocess)


async def run(settings: AllSettings, telemetry: Telemetry) -> None:
    """Serves the gateway's API from one process until SIGTERM."""

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        bundles = read_repository(settings.repository)
        async with (
            local_stages(bundles, settings, settings, telemetry) as stages,
            running_gateway(bundles, stages, settings, settings, telemetry) as gateway,
        ):
            life.in_flight.check_room = gateway.pipeline.check_room
            yield gateway_handlers(gateway, settings, settings, telemetry)

    await serve("all", settings, gateway_doors(settings, settings, telemetry), assemble)
