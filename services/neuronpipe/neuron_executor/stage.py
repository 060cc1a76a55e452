"""The prediction stage: loads every bundle's model onto its back end, warms it up, and runs sequences through the schedulers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from neuronpipe.api.v1.stages_pb2 import ExecuteItem, Prediction
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.config import EngineSettings
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.core.stages import Call
from neuronpipe.core.tensors import to_arrays, to_tensor_set
from neuronpipe.neuron_executor.backends import load_backend
from neuronpipe.neuron_executor.backends.base import Backend, BackendError, LoadRequest
from neuronpipe.neuron_executor.batch_time import BatchTime
from neuronpipe.neuron_executor.batching import pad, shortest_sequence
from neuronpipe.neuron_executor.records import ModelRecords
from neuronpipe.neuron_executor.scheduler import Computed, Limits, Scheduler, running_scheduler

# Lengths of the warm-up: as apart as costs little, to tell what a batch costs from what a token costs. Of images, which all have one
# length, that many rows.
_WARM_UP_TOKENS = (3, 64)
_WARM_UP_IMAGES = (1, 2)


class NeuronExecutorStage:
    """Runs sequences. The instance's `execute` is the stage function; made by `running_executor`."""

    def __init__(self, models: dict[tuple[str, int], tuple[Scheduler, ModelRecords]], telemetry: Telemetry) -> None:
        self._models = ModelTable(models)
        self._tracer = telemetry.tracer

    async def execute(self, item: ExecuteItem) -> Prediction:
        """Runs the sequences of one input."""
        arrived_ns = time.monotonic_ns()
        scheduler, records = self._models.find(item.model, item.version)
        call = Call.of_item(item.context)
        trace = self._tracer.joined(call.traceparent, call.tracestate)
        try:
            sequences = [to_arrays(sequence) for sequence in item.sequences]
            computed = await scheduler.run(sequences, call.deadline_s, is_bulk=call.is_bulk, trace=trace)
        except BaseException as error:
            records.dropped(trace, arrived_ns, error)
            raise
        finished_ns = max(one.finished_ns for one in computed)
        gaps = _gaps([(one.started_ns, one.finished_ns) for one in computed], arrived_ns)
        if trace:
            records.waited(trace, gaps)
        queue_ns = sum(ended_ns - began_ns for began_ns, ended_ns in gaps)
        return _prediction(computed, queue_ns, finished_ns - arrived_ns - queue_ns)


def _prediction(computed: list[Computed], queue_ns: int, compute_ns: int) -> Prediction:
    return Prediction(
        outputs=[to_tensor_set(one.outputs) for one in computed],
        compute_ns=compute_ns,
        queue_ns=queue_ns,
        batch_size=max(one.batch_size for one in computed),
        bucket_tokens=max(one.bucket_tokens for one in computed),
        padded_tokens=sum(one.bucket_tokens for one in computed),
    )


def _gaps(intervals: list[tuple[int, int]], arrived_ns: int) -> list[tuple[int, int]]:
    """The times from arrival to the last interval's end that none covers; sequences of one batch share theirs."""
    gaps = []
    until_ns = arrived_ns
    for start_ns, end_ns in sorted(intervals):
        if start_ns > until_ns:
            gaps.append((until_ns, start_ns))
        until_ns = max(until_ns, end_ns)
    return gaps


@asynccontextmanager
async def running_executor(
    bundles: list[Bundle], settings: EngineSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[NeuronExecutorStage]:
    """The stage with every model loaded and warmed up. Raises SetupError for a bundle that cannot run here."""
    telemetry = telemetry or Telemetry()
    limits = Limits(settings.max_batch_size, settings.max_batch_tokens, settings.max_queue_sequences)
    async with AsyncExitStack() as stack:
        models = {}
        for bundle in bundles:
            began_ns = time.monotonic_ns()
            backend = await asyncio.to_thread(_load, bundle, settings)
            stack.push_async_callback(asyncio.to_thread, backend.close)
            batch_time, lone_batch_time = await _warm_up(backend, bundle)
            log("model ready", model=bundle.spec.name, version=bundle.spec.version, cores=backend.cores)
            records = ModelRecords(telemetry, bundle.spec, bundle.artifact(settings.backend).backend, backend.cores)
            records.ready(time.monotonic_ns() - began_ns)
            scheduler = await stack.enter_async_context(
                running_scheduler(backend, bundle.spec, limits, batch_time, lone_batch_time, records)
            )
            models[bundle.key] = (scheduler, records)
        yield NeuronExecutorStage(models, telemetry)


def _load(bundle: Bundle, settings: EngineSettings) -> Backend:
    artifact = bundle.artifact(settings.backend)
    files = bundle.artifact_files(artifact)
    return load_backend(
        artifact.backend,
        LoadRequest(
            bundle.spec,
            files,
            artifact.properties,
            cores=settings.core_count,
            cores_per_replica=settings.cores_per_replica,
            threads=settings.threads,
            in_flight=settings.in_flight,
            buckets=artifact.buckets,
            versions=artifact.versions,
        ),
    )


async def _warm_up(backend: Backend, bundle: Bundle) -> tuple[BatchTime, BatchTime]:
    """Runs every bucket on every core, or a short and a long sequence, so that the first request finds everything allocated.

    Returns how long a batch takes, timed on one core: beside others, and alone, which is the same thing where there is one core.
    """
    batch_time = BatchTime()
    lone_batch_time = BatchTime() if backend.cores > 1 and backend.buckets is None else batch_time
    try:
        for rows, tokens in _warm_up_shapes(backend, bundle.spec):
            for core in range(backend.cores):
                await _run(backend, core, bundle.spec, rows, tokens)
            for is_alone, estimate in ((False, batch_time), (True, lone_batch_time)):
                if is_alone:
                    await _run(backend, 0, bundle.spec, rows, tokens, is_alone=True)
                # The quicker one: all services of a machine may start at once.
                seconds = min([await _run(backend, 0, bundle.spec, rows, tokens, is_alone=is_alone) for _ in range(2)])
                estimate.anchor(rows * tokens, seconds)
    except BackendError as error:
        raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
    return batch_time, lone_batch_time


def _warm_up_shapes(backend: Backend, spec: ModelSpec) -> list[tuple[int, int]]:
    """Rows and tokens of each batch."""
    if backend.buckets:
        return [(bucket.batch, bucket.tokens) for bucket in backend.buckets.buckets]
    if spec.image:
        return [(rows, backend.round_tokens(spec.image.tokens)) for rows in _WARM_UP_IMAGES]
    return [(1, backend.round_tokens(min(length, spec.max_tokens))) for length in _WARM_UP_TOKENS]


async def _run(backend: Backend, core: int, spec: ModelSpec, rows: int, padded_tokens: int, *, is_alone: bool = False) -> float:
    """Runs the shortest sequences; returns the seconds it took."""
    inputs = pad([shortest_sequence(spec)] * rows, padded_tokens, spec)
    began_s = time.monotonic()
    await backend.run(core, inputs, is_alone=is_alone)
    return time.monotonic() - began_s
