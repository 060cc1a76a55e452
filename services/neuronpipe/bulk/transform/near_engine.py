"""The whole pipeline in this process, for one model, with batches that follow from the rows alone: so a run that is
resumed computes the same bits as one that is not.

The rows of a window go through the pipeline side by side. Each arrives at BatchMaker with its sequences, in place of
the executor. When all have arrived, or failed before, the sequences are sorted by length, cut into batches, and each
batch is one item for the executor (stages/neuron_executor/batching.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.request import Answer, ModelFacts, Outcome
from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.bundles.repository import Bundle, read_trusted_repository
from neuronpipe.bundles.served import running_models
from neuronpipe.bundles.sources import FolderRepository
from neuronpipe.core.background import run_together
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    InternalError,
    InvalidInput,
    ModelNotFound,
    NeuronpipeError,
    SetupError,
    Unavailable,
    WrongTask,
)
from neuronpipe.core.items import Execute, ExecuteItem, Prediction, Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.packed import TensorSets, pack_input
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.inference import InferenceRequest
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.routing import open_gateway_models
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.postprocessor.stage import running_postprocessor
from neuronpipe.stages.settings import EncodingSettings, EngineSettings
from neuronpipe.stages.tokenizer.stage import running_tokenizer
from neuronpipe.tasks.inputs.kind import input_kind


class TransformSettings(EngineSettings, EncodingSettings, PipelineSettings):
    """Settings of `neuronpipe transform --repository`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_TRANSFORM_")
    whole_items: ClassVar[bool] = True

    # A batch of MiniLM with 256 to 512 tokens was fastest on CPUs (docs/benchmarks/README.md). Devices want more.
    max_batch_tokens: int = Field(
        512, ge=1, description="padded tokens of a batch of several sequences; not for buckets. More for GPUs, as 16384"
    )
    max_batch_size: int = Field(256, ge=1, le=4096, description="sequences in a batch; not for buckets")
    window_rows: int = Field(
        1024,
        ge=1,
        le=1 << 16,
        description="neighbouring rows of a shard whose sequences are sorted by length and cut into batches",
    )
    # Rows wait for those of their window, and memory is bounded by the windows in flight.
    max_requests_in_flight: int = Field(1 << 20, ge=1, description="as of the gateway; a window's rows must fit in")
    max_tokens_in_flight: int = Field(1 << 40, ge=1, description="as of the gateway")
    max_queue_sequences: int = Field(1 << 20, ge=1, description="as of the neuron-executor")
    max_request_s: float = Field(86_400.0, gt=0, le=86_400, description="as of the gateway")
    # Texts seldom come twice.
    token_cache_bytes: int = Field(0, ge=0, description="as of the tokenizer")
    image_cache_bytes: int = Field(0, ge=0, description="as of the tokenizer")


# Batches at the executor at once: enough for all cores, few enough for windows to end one after the other.
_BATCHES = 64
# As the OpenVINO back end pads. Within a step the order is that of the rows.
_TOKEN_STEP = 4

CutBatches = Callable[[Sequence[int]], Iterator[list[int]]]


@dataclass(slots=True)
class _Row:
    """A row's sequences, and what is known of their outputs."""

    item: ExecuteItem
    done: "asyncio.Future[Prediction]"
    outputs: list[Arrays | None]
    missing: int
    padded_tokens: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0


@dataclass(slots=True)
class Window:
    """The rows that share batches. `expected`: those that have neither arrived nor failed."""

    expected: int
    rows: dict[int, _Row] = field(default_factory=dict)
    running: "asyncio.Task[None] | None" = None


class BatchMaker:
    """The executor's place in the pipeline: its `execute` is the stage function."""

    def __init__(self, execute: Execute, bundle: Bundle, settings: EngineSettings) -> None:
        self._execute = execute
        self._tokens_of = input_kind(bundle.spec).tokens_of
        self._cut = cut_batches(bundle, settings)
        self._windows: dict[int, Window] = {}
        self._opened = 0
        self._places = asyncio.Semaphore(_BATCHES)

    def open(self, rows: int) -> int:
        """A window of so many rows, whose requests have the ids that `request_id` makes."""
        self._opened += 1
        self._windows[self._opened] = Window(rows)
        return self._opened

    async def close(self, number: int) -> None:
        """Ends a window whose rows have all left."""
        if running := self._windows.pop(number).running:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def leave(self, number: int, row: int) -> None:
        """A row has ended, with its result or an error."""
        window = self._windows[number]
        if row not in window.rows:
            window.expected -= 1
            self._begin(window)

    async def execute(self, item: ExecuteItem) -> Prediction:
        """Waits for the row's window, and computes it. Raises InternalError where the model cannot compute the row."""
        number, row = map(int, item.call.request_id.split("/"))
        window, count = self._windows[number], len(item.sequences)
        done: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        window.rows[row] = _Row(item, done, [None] * count, count)
        window.expected -= 1
        self._begin(window)
        return await done

    def _begin(self, window: Window) -> None:
        if not window.expected and window.rows and not window.running:
            window.running = asyncio.create_task(self._compute(window))

    async def _compute(self, window: Window) -> None:
        """Computes all rows, and answers each as soon as its last sequence is computed."""
        rows = [window.rows[number] for number in sorted(window.rows)]
        places = [(row, index) for row in rows for index in range(len(row.outputs))]
        lengths = [self._tokens_of(row.item.sequences.arrays[index]) for row, index in places]
        async with asyncio.TaskGroup() as group:
            for batch in self._cut(lengths):
                await self._places.acquire()
                task = group.create_task(self._run([places[place] for place in batch]))
                task.add_done_callback(lambda _: self._places.release())

    async def _run(self, batch: list[tuple[_Row, int]]) -> None:
        first = batch[0][0].item
        arrays = [row.item.sequences.arrays[index] for row, index in batch]
        try:
            found = await self._execute(ExecuteItem(first.call, first.model, TensorSets(arrays=arrays)))
        except InternalError as error:
            if len(batch) > 1:  # one of them is the reason
                for one in batch:
                    await self._run([one])
                return
            _fail(batch, error)
        except Exception as error:  # the rows that wait get it, and the pipeline tells faults from errors
            _fail(batch, error)
        else:
            for (row, index), outputs in zip(batch, found.outputs.arrays, strict=True):
                _note(row, index, outputs, found)


def request_id(window: int, row: int) -> str:
    """The id of a row's request."""
    return f"{window}/{row}"


def _fail(batch: Sequence[tuple[_Row, int]], error: Exception) -> None:
    for row, _ in batch:
        if not row.done.done():
            row.done.set_exception(error)


def _note(row: _Row, index: int, outputs: Arrays, found: Prediction) -> None:
    """Keeps the outputs of a sequence; the row's last one answers it."""
    row.outputs[index] = outputs
    row.missing -= 1
    row.padded_tokens += found.bucket_tokens
    row.batch_size, row.bucket_tokens = found.batch_size, found.bucket_tokens
    if not row.missing and not row.done.done():
        complete = [one for one in row.outputs if one is not None]
        row.done.set_result(
            Prediction(
                TensorSets(arrays=complete),
                batch_size=row.batch_size,
                bucket_tokens=row.bucket_tokens,
                padded_tokens=row.padded_tokens,
            )
        )


def cut_batches(bundle: Bundle, settings: EngineSettings) -> CutBatches:
    """What cuts sequences, given by their lengths, into batches of their places, the longest first."""
    if buckets := bundle.artifact(settings.backend).buckets:
        plan = BucketPlan(buckets)

        def most(length: int) -> int:
            return plan.batches(plan.round_tokens(length))[-1]
    else:

        def most(length: int) -> int:
            padded = -(-length // _TOKEN_STEP) * _TOKEN_STEP
            return max(1, min(settings.max_batch_size, settings.max_batch_tokens // padded))

    def cut(lengths: Sequence[int]) -> Iterator[list[int]]:
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        start = 0
        while start < len(order):
            end = start + most(lengths[order[start]])
            yield order[start:end]
            start = end

    return cut


# A window is computed while the next one is tokenized and the last one written.
_WINDOWS = 3
# Images of a window are in memory as pixels.
_IMAGES = 64
# Errors of a row; all others end the run.
_OF_ROWS = (InvalidInput, WrongTask, InternalError)


class NearEngine:
    """See Engine."""

    windows_in_flight = _WINDOWS

    def __init__(self, bundle: Bundle, pipeline: Pipeline, batches: BatchMaker, settings: TransformSettings) -> None:
        self.model = facts_of(bundle, settings)
        self.window_rows = min(settings.window_rows, _IMAGES) if bundle.spec.image else settings.window_rows
        self._pipeline = pipeline
        self._batches = batches

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[Outcome]:
        """See Engine."""
        window = self._batches.open(len(inputs))
        try:
            return await run_together(self._one(window, row, input) for row, input in enumerate(inputs))
        finally:
            await self._batches.close(window)

    async def _one(self, window: int, row: int, input: TaskInput) -> Outcome:
        call = Call(request_id(window, row), priority=Priority.PRIORITY_BULK)
        request = InferenceRequest(call, self.model.name, self.model.version, pack_input(input))
        try:
            found = await self._pipeline.infer(request)
        except NeuronpipeError as error:
            if isinstance(error, _OF_ROWS):
                return error
            raise
        finally:
            self._batches.leave(window, row)
        usage = found.usage
        return Answer(found.result.message, usage.tokens, usage.truncated_tokens, usage.padded_tokens)


def find_bundle(repository: Path, model: str, version: str = "", trusted_keys: Path | None = None) -> Bundle:
    """A version of a model by its number or alias; without one as the registry says, or the newest.

    `trusted_keys`: see read_trusted_repository. Raises SetupError.
    """
    bundles = {bundle.key: bundle for bundle in read_trusted_repository(repository, trusted_keys)}
    table = ModelTable(bundles, FolderRepository(repository).read_registry().routes)
    try:
        return table.find(model, version)
    except (ModelNotFound, InvalidInput, Unavailable) as error:
        raise SetupError(f"--repository {repository}: {error.message}") from error


def facts_of(bundle: Bundle, settings: TransformSettings) -> ModelFacts:
    """The model, with what its batches follow from."""
    batching = (
        f"{bundle.artifact(settings.backend).backend}: {settings.window_rows} rows, "
        f"{settings.max_batch_size} sequences, {settings.max_batch_tokens} tokens"
    )
    return ModelFacts(bundle.spec.name, str(bundle.spec.version), bundle.digest, bundle.spec.tasks, batching)


@asynccontextmanager
async def running_near_engine(
    bundle: Bundle, settings: TransformSettings, observe: Callable[[Execute], Execute] = lambda execute: execute
) -> AsyncIterator[NearEngine]:
    """The engine, loaded and warmed up. `observe`: put around what computes a batch.

    Raises SetupError for a bundle that cannot run here.
    """
    telemetry = Telemetry()
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(running_executor([bundle], settings, telemetry))
        tokenizer = await stack.enter_async_context(running_tokenizer([bundle], settings, telemetry))
        postprocessor = await stack.enter_async_context(running_postprocessor([bundle]))
        # Results are not cached: of a result that another batch computed the last bits may differ.
        models = open_gateway_models(telemetry.meters, lambda bundle: False)
        await stack.enter_async_context(running_models(models, [bundle]))
        batches = BatchMaker(observe(executor.execute), bundle, settings)
        stages = Stages(tokenizer.tokenize, batches.execute, postprocessor.postprocess)
        yield NearEngine(bundle, Pipeline(models, stages, settings, telemetry), batches, settings)
