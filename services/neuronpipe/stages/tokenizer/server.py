"""The tokenizer as a process of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.items import TOKENIZE
from neuronpipe.rpc.stage_server import OpenedStage, serve_stage
from neuronpipe.stages.tokenizer.settings import TokenizerSettings
from neuronpipe.stages.tokenizer.stage import running_tokenizer


async def run(settings: TokenizerSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Serves until SIGTERM."""

    @asynccontextmanager
    async def open_stage() -> AsyncIterator[OpenedStage]:
        repository = await asyncio.to_thread(live_repository, settings, with_artifacts=False)
        async with (
            running_tokenizer([], settings, telemetry) as stage,
            running_live_models(repository, [stage.models], telemetry.meters),
        ):
            yield stage.tokenize, stage.models

    await serve_stage(TOKENIZE, settings, telemetry, open_stage, tls)
