"""The stages of a gateway, each near or far by its target."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.far_stages import running_far_stages
from neuronpipe.local.settings import PipelineProcessSettings
from neuronpipe.tls.files import WatchedTls


@asynccontextmanager
async def running_stages(
    bundles: list[Bundle],
    settings: PipelineProcessSettings,
    telemetry: Telemetry,
    report: Callable[[str, bool], None],
    tls: WatchedTls | None = None,
) -> AsyncIterator[Stages]:
    """The stages of this process, loaded and warmed up, and those behind targets.
    `report`, `tls`: see running_far_stages. Raises SetupError.

    A stage that is not in this process is not even imported: its libraries need not be installed.
    """
    far = settings.far_targets
    functions: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if "neuron-executor" not in far:
            from neuronpipe.neuron_executor.stage import running_executor

            executor = await stack.enter_async_context(running_executor(bundles, settings, telemetry))
            functions["neuron-executor"] = executor.execute
        if "tokenizer" not in far:
            from neuronpipe.tokenizer.stage import running_tokenizer

            tokenizer = await stack.enter_async_context(running_tokenizer(bundles, settings, telemetry))
            functions["tokenizer"] = tokenizer.tokenize
        if "postprocessor" not in far:
            from neuronpipe.postprocessor.stage import running_postprocessor

            postprocessor = await stack.enter_async_context(running_postprocessor(bundles))
            functions["postprocessor"] = postprocessor.postprocess
        if far:
            functions |= await stack.enter_async_context(running_far_stages(far, telemetry.meters, report, tls))
        yield Stages(functions["tokenizer"], functions["neuron-executor"], functions["postprocessor"])
