"""The tokenizer as a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import TokenizerSettings
from neuronpipe.rpc.server import Method, SetServing, serve
from neuronpipe.tokenizer.stage import TokenizerStage


async def run(settings: TokenizerSettings) -> None:
    """Serves until SIGTERM."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        stage = await asyncio.to_thread(lambda: TokenizerStage(read_repository(settings.repository)))
        try:
            yield {"Tokenize": lambda request, context: stage.tokenize(request)}
        finally:
            stage.close()

    await serve("tokenizer", settings, [stages_pb2.DESCRIPTOR.services_by_name["TokenizerService"]], assemble)
