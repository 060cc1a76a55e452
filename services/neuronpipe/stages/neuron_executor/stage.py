"""The prediction stage: loads each bundle's model onto its back end, warms it up, and runs sequences."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.generated import NewTokens, TokenSink, TokenStream
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.process.background import run_apart
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.generation.engine import Generator
from neuronpipe.stages.neuron_executor.memory import memory_shortage
from neuronpipe.stages.neuron_executor.neuron_monitor import record_snapshot, running_monitor
from neuronpipe.stages.neuron_executor.on_demand import LoadedModel, OnDemandModel, model_table
from neuronpipe.stages.neuron_executor.runtimes.host import memory_limit
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.inputs.kind import adapted

_NEURON = "neuronx"


class NeuronExecutorStage:
    """Runs sequences. The methods `execute` and `generate` are the stage functions. `running_executor` makes it."""

    def __init__(self, models: ServedModels[LoadedModel | OnDemandModel], telemetry: Telemetry) -> None:
        self.models = models
        self._tracer = telemetry.tracer

    def generate(self, item: ExecuteItem) -> AsyncGenerator[NewTokens | Prediction, None]:
        """Yields the tokens of one text as they come, and in the end the prediction."""
        stream = TokenStream(is_urgent=item.is_urgent)
        return stream.read(self.execute(item, stream))

    async def execute(self, item: ExecuteItem, stream: TokenSink | None = None) -> Prediction:
        """Runs the sequences of one input. The tokens of a text are put into the stream as they come."""
        arrived_ns = time.monotonic_ns()
        served = self.models.table.at(item.model)
        with served as model:
            if isinstance(model, OnDemandModel):
                async with model.use() as loaded:
                    return await self._run(item, loaded, served.spec, arrived_ns, stream)
            return await self._run(item, model, served.spec, arrived_ns, stream)

    async def _run(
        self, item: ExecuteItem, model: LoadedModel, spec: ModelSpec, arrived_ns: int, stream: TokenSink | None
    ) -> Prediction:
        if isinstance(model, Generator):
            return await model.generate(item, stream)
        trace = self._tracer.joined(item.work.trace)
        try:
            sequences = item.sequences.arrays
            if spec.adapters:
                sequences = [adapted(arrays, spec.adapter) for arrays in sequences]
            computed = await model.run(sequences, item.call, trace, is_beyond_share=item.work.is_beyond_share)
        except BaseException as error:
            model.observer.dropped(trace, arrived_ns, error)
            raise
        if len(computed) == 1 and not trace:  # the usual case, in fewer steps and with the same result
            [sequence] = computed
            queue_ns = max(0, sequence.started_ns - arrived_ns)
            compute_ns, tokens = sequence.finished_ns - arrived_ns - queue_ns, sequence.bucket_tokens
            outputs = TensorSets(arrays=[sequence.outputs])
            return Prediction(outputs, queue_ns, compute_ns, sequence.batch_size, tokens, tokens)
        finished_ns = max(sequence.finished_ns for sequence in computed)
        gaps = _gaps({(sequence.started_ns, sequence.finished_ns) for sequence in computed}, arrived_ns)
        if trace:
            model.observer.waited(trace, gaps)
        queue_ns = sum(ended_ns - began_ns for began_ns, ended_ns in gaps)
        return Prediction(
            outputs=TensorSets(arrays=[sequence.outputs for sequence in computed]),
            queue_ns=queue_ns,
            compute_ns=finished_ns - arrived_ns - queue_ns,
            batch_size=max(sequence.batch_size for sequence in computed),
            bucket_tokens=max(sequence.bucket_tokens for sequence in computed),
            padded_tokens=sum(sequence.bucket_tokens for sequence in computed),
        )


def _gaps(intervals: Collection[tuple[int, int]], arrived_ns: int) -> list[tuple[int, int]]:
    """The times between arrival and the end of the last interval that no interval covers.

    Sequences of one batch have the same interval.
    """
    gaps = []
    until_ns = arrived_ns
    for start_ns, end_ns in sorted(intervals):
        if start_ns > until_ns:
            gaps.append((until_ns, start_ns))
        until_ns = max(until_ns, end_ns)
    return gaps


@asynccontextmanager
async def running_executor(
    bundles: list[Bundle],
    settings: EngineSettings,
    telemetry: Telemetry | None = None,
    known: Sequence[Bundle] = (),
    report: Callable[[bool], None] = lambda is_well: None,
    model_class: type[ExecutorModel] = ExecutorModel,
) -> AsyncIterator[NeuronExecutorStage]:
    """Runs the stage with every model loaded and warmed up.

    `known`: other bundles that will be opened. `report`: gets whether the process is well, at each change; see
    Impairment. `model_class`: runs the models that do not generate. Raises SetupError for a bundle that cannot run
    here, and CoresLost if a device has no core left.
    """
    telemetry = telemetry or Telemetry()
    if shortage := await run_apart(memory_shortage, bundles, settings, memory_limit()):
        log_warning("the container's memory may not be enough", problem=shortage)
    async with running_devices(settings, telemetry, model_class) as devices, AsyncExitStack() as stack:
        devices.start(devices.impairment.tell(report))
        models = await stack.enter_async_context(running_models(model_table(devices, settings, telemetry), bundles))
        if any(bundle.artifact(settings.backend).backend == _NEURON for bundle in (*bundles, *known)):
            await stack.enter_async_context(running_monitor(record=partial(record_snapshot, telemetry.meters)))
        yield NeuronExecutorStage(models, telemetry)
