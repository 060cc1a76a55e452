"""The stages of a pipeline process: stages inside it, and stages behind targets."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.items import Detokenize, Execute, Postprocess, Stages, Tokenize
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import EXECUTOR, POSTPROCESSOR, TOKENIZER
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.far_stages import running_far_stages
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.platform.tls import WatchedTls
from neuronpipe.serve.settings import PipelineProcessSettings


@dataclass(frozen=True, slots=True)
class RunningStages:
    """The stages of a pipeline.

    `functions`: run a stage. `near`: the models of the stages in this process. `far`: the stages in other processes.
    """

    functions: Stages
    near: Sequence[ServedModels[Any]]
    far: Mapping[str, Coalescer]


@asynccontextmanager
async def running_stages(
    settings: PipelineProcessSettings,
    telemetry: Telemetry,
    report: Callable[[str, bool], None],
    bundles: Sequence[Bundle],
    tls: WatchedTls | None = None,
    held_items: HeldItems | None = None,
) -> AsyncIterator[RunningStages]:
    """Runs the stages of this process, without models yet, and connects to the stages behind targets.

    `report`, `tls`, `held_items`: see running_far_stages. With an empty name, `report` gets whether this process is
    well. `bundles`: the bundles whose models the caller will open. Raises SetupError.

    A stage in another process is not even imported, so that its libraries need not be installed.
    """
    targets = settings.gateway.far_targets
    near: list[ServedModels[Any]] = []
    far: Mapping[str, Coalescer] = {}
    tokenize: Tokenize
    execute: Execute
    postprocess: Postprocess
    detokenize: Detokenize | None = None
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        if targets:
            far = await enter(running_far_stages(targets, telemetry.meters, report, tls, held_items))
        if stage := far.get(EXECUTOR):
            execute = stage.send
        else:
            from neuronpipe.stages.neuron_executor.stage import running_executor

            executor = await enter(running_executor([], settings.executor, telemetry, bundles, partial(report, "")))
            execute = executor.execute
            near.append(executor.models)
        if stage := far.get(TOKENIZER):
            tokenize = stage.send
        else:
            from neuronpipe.stages.tokenizer.stage import running_tokenizer

            tokenizer = await enter(running_tokenizer([], settings.tokenizer, telemetry, settings.redis))
            tokenize = tokenizer.tokenize
            near.append(tokenizer.models)
        if stage := far.get(POSTPROCESSOR):
            postprocess = stage.send
        else:
            from neuronpipe.stages.postprocessor.stage import running_postprocessor

            postprocessor = await enter(running_postprocessor([]))
            postprocess, detokenize = postprocessor.postprocess, postprocessor.detokenize_at_once
            near.append(postprocessor.models)
        yield RunningStages(Stages(tokenize, execute, postprocess, detokenize), near, far)
