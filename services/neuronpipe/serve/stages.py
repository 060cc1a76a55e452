"""The stages of a pipeline process: those in it, loaded and warmed up, and those behind targets."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.far_stages import running_far_stages
from neuronpipe.gateway.holding import Holding
from neuronpipe.platform.tls import WatchedTls
from neuronpipe.serve.settings import PipelineProcessSettings


@dataclass(frozen=True, slots=True)
class RunningStages:
    """The stages as functions, the tables of those in this process, and those in other processes by name."""

    functions: Stages
    near: Sequence[ServedModels[Any]]
    far: Mapping[str, Coalescer]


@asynccontextmanager
async def running_stages(
    bundles: list[Bundle],
    settings: PipelineProcessSettings,
    telemetry: Telemetry,
    report: Callable[[str, bool], None],
    tls: WatchedTls | None = None,
    known: Sequence[Bundle] = (),
    holding: Holding | None = None,
) -> AsyncIterator[RunningStages]:
    """The stages of this process, loaded and warmed up, and those behind targets.
    `report`, `tls`, `holding`: see running_far_stages. `known`: bundles that will be opened later. Raises SetupError.

    A stage that is not in this process is not even imported: its libraries need not be installed.
    """
    far = settings.far_targets
    functions: dict[str, Any] = {}
    near: list[ServedModels[Any]] = []
    others: Mapping[str, Coalescer] = {}
    async with AsyncExitStack() as stack:
        if "neuron-executor" not in far:
            from neuronpipe.stages.neuron_executor.stage import running_executor

            executor = await stack.enter_async_context(running_executor(bundles, settings, telemetry, known))
            functions["neuron-executor"] = executor.execute
            near.append(executor.models)
        if "tokenizer" not in far:
            from neuronpipe.stages.tokenizer.stage import running_tokenizer

            tokenizer = await stack.enter_async_context(running_tokenizer(bundles, settings, telemetry))
            functions["tokenizer"] = tokenizer.tokenize
            near.append(tokenizer.models)
        if "postprocessor" not in far:
            from neuronpipe.stages.postprocessor.stage import running_postprocessor

            postprocessor = await stack.enter_async_context(running_postprocessor(bundles))
            functions["postprocessor"] = postprocessor.postprocess
            near.append(postprocessor.models)
        if far:
            others = await stack.enter_async_context(running_far_stages(far, telemetry.meters, report, tls, holding))
            functions |= others
        called = Stages(functions["tokenizer"], functions["neuron-executor"], functions["postprocessor"])
        yield RunningStages(called, near, others)
