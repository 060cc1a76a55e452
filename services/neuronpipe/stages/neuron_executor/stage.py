"""The prediction stage: loads each bundle's model onto its back end, warms it up, and runs sequences."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.generation.engine import Generator
from neuronpipe.stages.neuron_executor.neuron_monitor import record_snapshot, running_monitor
from neuronpipe.stages.neuron_executor.on_demand import LoadedModel, OnDemandModel, model_table
from neuronpipe.stages.settings import EngineSettings

_NEURON = "neuronx"


class NeuronExecutorStage:
    """Runs sequences. The instance's `execute` is the stage function; made by `running_executor`."""

    def __init__(self, models: ServedModels[LoadedModel | OnDemandModel], telemetry: Telemetry) -> None:
        self.models = models
        self._tracer = telemetry.tracer

    async def execute(self, item: ExecuteItem) -> Prediction:
        """Runs the sequences of one input."""
        arrived_ns = time.monotonic_ns()
        with self.models.table.find(item.model.name, str(item.model.version)) as model:
            if isinstance(model, OnDemandModel):
                async with model.use() as loaded:
                    return await self._run(item, loaded, arrived_ns)
            return await self._run(item, model, arrived_ns)

    async def _run(self, item: ExecuteItem, model: LoadedModel, arrived_ns: int) -> Prediction:
        if isinstance(model, Generator):
            return await model.generate(item)
        call, trace = item.call, self._tracer.joined(item.call.trace)
        try:
            computed = await model.run(item.sequences.arrays, call, trace)
        except BaseException as error:
            model.observer.dropped(trace, arrived_ns, error)
            raise
        if len(computed) == 1 and not trace:  # as most; what follows would say the same
            [one] = computed
            queue_ns = max(0, one.started_ns - arrived_ns)
            compute_ns = one.finished_ns - arrived_ns - queue_ns
            outputs = TensorSets(arrays=[one.outputs])
            return Prediction(outputs, queue_ns, compute_ns, one.batch_size, one.bucket_tokens, one.bucket_tokens)
        finished_ns = max(one.finished_ns for one in computed)
        gaps = _gaps([(one.started_ns, one.finished_ns) for one in computed], arrived_ns)
        if trace:
            model.observer.waited(trace, gaps)
        queue_ns = sum(ended_ns - began_ns for began_ns, ended_ns in gaps)
        return Prediction(
            outputs=TensorSets(arrays=[one.outputs for one in computed]),
            queue_ns=queue_ns,
            compute_ns=finished_ns - arrived_ns - queue_ns,
            batch_size=max(one.batch_size for one in computed),
            bucket_tokens=max(one.bucket_tokens for one in computed),
            padded_tokens=sum(one.bucket_tokens for one in computed),
        )


def _gaps(intervals: list[tuple[int, int]], arrived_ns: int) -> list[tuple[int, int]]:
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
) -> AsyncIterator[NeuronExecutorStage]:
    """The stage with every model loaded and warmed up. `known`: others that will be opened.

    Raises SetupError for a bundle that cannot run here, and CoresLost if a device has no core left.
    """
    telemetry = telemetry or Telemetry()
    async with running_devices(settings, telemetry) as devices, AsyncExitStack() as stack:
        models = await stack.enter_async_context(running_models(model_table(devices, settings, telemetry), bundles))
        if any(bundle.artifact(settings.backend).backend == _NEURON for bundle in (*bundles, *known)):
            await stack.enter_async_context(running_monitor(record=partial(record_snapshot, telemetry.meters)))
        yield NeuronExecutorStage(models, telemetry)
