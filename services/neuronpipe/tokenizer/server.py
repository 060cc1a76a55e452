"""The tokenizer as a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import TokenizerSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.rpc.items import TOKENIZE, stage_method
from neuronpipe.rpc.server import Method, SetServing, serve
from neuronpipe.tokenizer.stage import running_tokenizer


async def run(settings: TokenizerSettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        bundles = await asyncio.to_thread(read_repository, settings.repository)
        async with running_tokenizer(bundles, settings, telemetry) as stage:
            yield stage_method(TOKENIZE, stage.tokenize, telemetry)

    await serve("tokenizer", settings, [TOKENIZE.service], assemble, traces=telemetry.traces)
