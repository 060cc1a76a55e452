"""The prediction stage: loads each bundle's model onto its back end, warms it up, and runs sequences."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from operator import attrgetter

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.errors import SetupError
from neuronpipe.core.generated import TokenSink
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.process.background import run_apart
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.memory import memory_shortage
from neuronpipe.stages.neuron_executor.neuron_monitor import record_snapshot, running_monitor
from neuronpipe.stages.neuron_executor.on_demand import LoadedModel, OnDemandModel, model_table
from neuronpipe.stages.neuron_executor.runtimes.host import memory_limit
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.inputs.kind import adapted

_NEURON = "neuronx"
_START = attrgetter("started_ns")


class NeuronExecutorStage:
    """Runs sequences. The method `execute` is the stage function. `running_executor` makes it."""

    def __init__(self, models: ServedModels[LoadedModel | OnDemandModel], telemetry: Telemetry) -> None:
        self.models = models
        self._tracer = telemetry.tracer

    async def execute(self, item: ExecuteItem, sink: TokenSink | None = None) -> Prediction:
        """Runs the sequences of one input. The tokens of a text are put into the sink as they come."""
        arrived_ns = time.monotonic_ns()
        served = self.models.table.at(item.model)
        with served as model:
            if isinstance(model, OnDemandModel):
                async with model.use() as loaded:
                    return await self._run(item, loaded, served.spec, arrived_ns, sink)
            return await self._run(item, model, served.spec, arrived_ns, sink)

    async def _run(
        self, item: ExecuteItem, model: LoadedModel, spec: ModelSpec, arrived_ns: int, sink: TokenSink | None
    ) -> Prediction:
        if isinstance(model, TextGenerator):
            return await model.generate(item, sink)
        trace = self._tracer.joined(item.work.trace)
        try:
            sequences = item.sequences.arrays
            if spec.adapters:
                sequences = [adapted(arrays, spec.adapter) for arrays in sequences]
            computed = await model.run(sequences, item.call, trace, is_beyond_share=item.work.is_beyond_share)
        except BaseException as error:
            model.observer.dropped(trace, arrived_ns, error)
            raise
        return prediction_of(computed, arrived_ns, partial(model.observer.waited, trace) if trace else None)


def prediction_of(
    computed: list[ComputedSequence], arrived_ns: int, waited: Callable[[int, int], None] | None = None
) -> Prediction:
    """Makes the prediction of an item from its sequences, which are in order.

    The item is computed while at least one of its sequences is, and waits otherwise. `waited`: called with the begin
    and the end of each wait.
    """
    outputs = TensorSets(arrays=[sequence.outputs for sequence in computed])
    queue_ns, until_ns, batch_size, bucket_tokens, padded_tokens = 0, arrived_ns, 0, 0, 0
    computed.sort(key=_START)
    for sequence in computed:
        if sequence.started_ns > until_ns:
            queue_ns += sequence.started_ns - until_ns
            if waited:
                waited(until_ns, sequence.started_ns)
        if sequence.finished_ns > until_ns:
            until_ns = sequence.finished_ns
        if sequence.batch_size > batch_size:
            batch_size = sequence.batch_size
        if sequence.bucket_tokens > bucket_tokens:
            bucket_tokens = sequence.bucket_tokens
        padded_tokens += sequence.bucket_tokens
    return Prediction(
        outputs=outputs,
        queue_ns=queue_ns,
        compute_ns=until_ns - arrived_ns - queue_ns,
        batch_size=batch_size,
        bucket_tokens=bucket_tokens,
        padded_tokens=padded_tokens,
    )


@asynccontextmanager
async def running_executor(
    bundles: list[Bundle],
    settings: EngineSettings,
    telemetry: Telemetry,
    later_bundles: Sequence[Bundle] = (),
    report: Callable[[bool], None] = lambda is_well: None,
    model_class: type[ExecutorModel] = ExecutorModel,
) -> AsyncIterator[NeuronExecutorStage]:
    """Runs the stage with every model loaded and warmed up.

    - `later_bundles`: bundles whose models the caller will open.
    - `report`: gets whether the process is well, at each change; see Impairment.
    - `model_class`: runs the models that do not generate.

    Raises SetupError for a bundle that cannot run here, and CoresLost if a device has no core left.
    """
    every_bundle = [*bundles, *later_bundles]
    with suppress(SetupError):  # a bundle that lacks a file is refused when its model is opened
        if shortage := await run_apart(memory_shortage, every_bundle, settings, memory_limit()):
            log_warning("the container's memory may not be enough", problem=shortage)
    async with running_devices(settings, telemetry, model_class) as devices, AsyncExitStack() as stack:
        devices.start(devices.impairment.report_changes(report))
        models = await stack.enter_async_context(running_models(model_table(devices, settings, telemetry), bundles))
        if any(bundle.artifact(settings.backend).backend == _NEURON for bundle in every_bundle):
            await stack.enter_async_context(running_monitor(record=partial(record_snapshot, telemetry.meters)))
        yield NeuronExecutorStage(models, telemetry)
