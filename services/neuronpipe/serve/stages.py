"""The stages of a pipeline process: stages inside it, loaded and warmed up, and stages behind targets."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.far_stages import running_far_stages
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.platform.tls import WatchedTls
from neuronpipe.serve.settings import PipelineProcessSettings


@dataclass(frozen=True, slots=True)
class RunningStages:
    """The stages as functions, the tables of stages in this process, and the stages in other processes by name."""

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
    later_bundles: Sequence[Bundle] = (),
    held_items: HeldItems | None = None,
) -> AsyncIterator[RunningStages]:
    """Runs the stages of this process, loaded and warmed up, and connects to the stages behind targets.

    `report`, `tls`, `held_items`: see running_far_stages. With an empty name, `report` gets whether this process is
    well. `later_bundles`: bundles that will be opened later. Raises SetupError.

    A stage in another process is not even imported, so that its libraries need not be installed.
    """
    far = settings.gateway.far_targets
    functions: dict[str, Any] = {}
    near: list[ServedModels[Any]] = []
    far_stages: Mapping[str, Coalescer] = {}
    async with AsyncExitStack() as stack:
        if "neuron-executor" not in far:
            from neuronpipe.stages.neuron_executor.stage import running_executor

            running = running_executor(bundles, settings.executor, telemetry, later_bundles, partial(report, ""))
            executor = await stack.enter_async_context(running)
            functions["neuron-executor"], generate = executor.execute, executor.generate
            near.append(executor.models)
        if "tokenizer" not in far:
            from neuronpipe.stages.tokenizer.stage import running_tokenizer

            running_texts = running_tokenizer(bundles, settings.tokenizer, telemetry, settings.redis)
            tokenizer = await stack.enter_async_context(running_texts)
            functions["tokenizer"] = tokenizer.tokenize
            near.append(tokenizer.models)
        if "postprocessor" not in far:
            from neuronpipe.stages.postprocessor.stage import running_postprocessor

            postprocessor = await stack.enter_async_context(running_postprocessor(bundles))
            functions["postprocessor"] = postprocessor.postprocess
            near.append(postprocessor.models)
        if far:
            running_far = running_far_stages(far, telemetry.meters, report, tls, held_items)
            far_stages = await stack.enter_async_context(running_far)
            functions |= {name: stage.send for name, stage in far_stages.items()}
        if "neuron-executor" in far_stages:
            generate = far_stages["neuron-executor"].generate
        stages = Stages(functions["tokenizer"], functions["neuron-executor"], functions["postprocessor"], generate)
        yield RunningStages(stages, near, far_stages)
