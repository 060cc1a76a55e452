"""The whole pipeline in this process, for one model. Its batches depend on the rows alone, so that a resumed run
computes the same bits as an uninterrupted run.

The rows of a window go through the pipeline side by side. Each row arrives at BatchMaker with its sequences, instead of
at the executor. When all have arrived, or failed before, the sequences are sorted by length and cut into batches, and
each batch is one item for the executor (whole_items.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.request import InputAnswer, InputOutcome, ModelFacts
from neuronpipe.bulk.transform.whole_items import WholeItemModel
from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.repository import Bundle, read_trusted_repository
from neuronpipe.bundles.served import running_models
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError, InvalidInput, ModelNotFound, SetupError, Unavailable, WrongTask
from neuronpipe.core.items import Execute, ExecuteItem, Prediction, Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.packed import TensorSets, pack_input
from neuronpipe.core.settings import Settings
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.requests import InferenceRequest
from neuronpipe.gateway.routing import open_gateway_models
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.platform.process.background import run_together
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.postprocessor.stage import running_postprocessor
from neuronpipe.stages.settings import EncodingSettings, EngineSettings
from neuronpipe.stages.tokenizer.stage import running_tokenizer
from neuronpipe.tasks.inputs.kind import input_kind


class BulkEngineSettings(EngineSettings):
    """Settings of the executor for a transform. No row is refused, because rows wait for the rest of their window."""

    max_queue_sequences: ClassVar[int] = 1 << 20


class TransformSettings(Settings):
    """Settings of `neuronpipe transform --repository`."""

    prefix: ClassVar[str] = "NEURONPIPE_TRANSFORM_"
    defaults: ClassVar[Mapping[str, Any]] = {
        # A batch of MiniLM with 256 to 512 tokens was fastest on CPUs (docs/benchmarks/README.md). Devices want more.
        "max_batch_tokens": 512,
        "max_batch_size": 256,
        # Memory is bounded by the windows in flight.
        "max_requests_in_flight": 1 << 20,
        "max_tokens_in_flight": 1 << 40,
        "max_request_s": 86_400.0,
        # Texts seldom come twice.
        "token_cache_bytes": 0,
    }

    executor: BulkEngineSettings
    tokenizer: EncodingSettings
    redis: RedisSettings
    pipeline: PipelineSettings
    window_rows: int = Field(
        1024, ge=1, le=1 << 16, description="neighbouring rows whose sequences are sorted by length and cut to batches"
    )


# Limit of batches at the executor: keeps all cores busy, and lets windows end in order.
_BATCHES = 64

CutBatches = Callable[[Sequence[int]], Iterator[list[int]]]


@dataclass(slots=True)
class _Row:
    """A row's sequences, and their outputs so far."""

    item: ExecuteItem
    done: "asyncio.Future[Prediction]"
    outputs: list[Arrays | None]
    missing: int
    padded_tokens: int = 0

    def take(self, index: int, outputs: Arrays, prediction: Prediction) -> None:
        """Keeps the outputs of a sequence. The last sequence of the row answers it."""
        self.outputs[index] = outputs
        self.missing -= 1
        self.padded_tokens += prediction.bucket_tokens
        if not self.missing and not self.done.done():
            complete = TensorSets(arrays=[arrays for arrays in self.outputs if arrays is not None])
            size, bucket = prediction.batch_size, prediction.bucket_tokens
            self.done.set_result(
                Prediction(complete, batch_size=size, bucket_tokens=bucket, padded_tokens=self.padded_tokens)
            )


@dataclass(slots=True)
class BatchWindow:
    """The rows that share batches. `expected`: the number of rows that have neither arrived nor failed."""

    expected: int
    rows: dict[int, _Row] = field(default_factory=dict)
    running: "asyncio.Task[None] | None" = None


# The window of the row whose request the current task sends through the pipeline, and the number of the row.
_PLACE: ContextVar[tuple[BatchWindow, int]] = ContextVar("place")


class BatchMaker:
    """The executor's replacement in the pipeline: its `execute` is the stage function."""

    def __init__(self, execute: Execute, bundle: Bundle, settings: EngineSettings) -> None:
        self._execute = execute
        self._tokens_of = input_kind(bundle.spec).tokens_of
        self._cut = cut_batches(bundle, settings)
        self._places = asyncio.Semaphore(_BATCHES)

    @asynccontextmanager
    async def window(self, rows: int) -> AsyncIterator[BatchWindow]:
        """Yields a window for a number of rows, all of which leave in the block."""
        window = BatchWindow(rows)
        try:
            yield window
        finally:
            if window.running:
                window.running.cancel()
                await asyncio.gather(window.running, return_exceptions=True)

    @contextmanager
    def row(self, window: BatchWindow, number: int) -> Iterator[None]:
        """Sends the request of a row in the block, which the row leaves with its result or an error."""
        _PLACE.set((window, number))
        try:
            yield
        finally:
            if number not in window.rows:
                self._expect_one_less(window)

    async def execute(self, item: ExecuteItem) -> Prediction:
        """Waits for the row's window, and computes it. Raises InternalError if the model cannot compute the row."""
        (window, number), count = _PLACE.get(), len(item.sequences)
        done: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        window.rows[number] = _Row(item, done, [None] * count, count)
        self._expect_one_less(window)
        return await done

    def _expect_one_less(self, window: BatchWindow) -> None:
        window.expected -= 1
        if not window.expected and window.rows and not window.running:
            window.running = asyncio.create_task(self._compute(window))

    async def _compute(self, window: BatchWindow) -> None:
        """Computes all rows, and answers each when its last sequence is computed."""
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
            item = ExecuteItem(first.call, first.model, TensorSets(arrays=arrays), work=first.work)
            prediction = await self._execute(item)
        except Exception as error:  # the waiting rows raise it; the pipeline tells faults from errors
            if isinstance(error, InternalError) and len(batch) > 1:  # a sequence of the batch is the reason
                for sequence in batch:
                    await self._run([sequence])
                return
            for row, _ in batch:
                if not row.done.done():
                    row.done.set_exception(error)
        else:
            for (row, index), outputs in zip(batch, prediction.outputs.arrays, strict=True):
                row.take(index, outputs, prediction)


def cut_batches(bundle: Bundle, settings: EngineSettings) -> CutBatches:
    """Returns a function that cuts sequences, given by length, into batches of their places, the longest first."""
    if buckets := bundle.artifact(settings.backend).buckets:
        plan = BucketPlan(buckets)

        def most(length: int) -> int:
            return plan.batches(plan.round_tokens(length))[-1]
    else:
        menu = ShapeMenu(bundle.spec, settings.max_batch_tokens)

        def most(length: int) -> int:
            return menu.rows_within(settings.max_batch_size, menu.round_tokens(length))

    def cut(lengths: Sequence[int]) -> Iterator[list[int]]:
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        # Images are longer than all texts of their model, and have batches without texts.
        images = sum(length > bundle.spec.max_tokens for length in lengths)
        start = 0
        while start < len(order):
            end = start + most(lengths[order[start]])
            if start < images:
                end = min(end, images)
            yield order[start:end]
            start = end

    return cut


# A window is computed while the next window is tokenized and the last window written.
_WINDOWS = 3
# Maximum number of rows of a window with images, which are in memory as pixels.
_IMAGES = 64
# Errors of a row; all others end the run.
_OF_ROWS = (InvalidInput, WrongTask, InternalError)


class NearEngine:
    windows_in_flight = _WINDOWS

    def __init__(self, bundle: Bundle, pipeline: Pipeline, batches: BatchMaker, settings: TransformSettings) -> None:
        self.model = facts_of(bundle, settings)
        self.window_rows = min(settings.window_rows, _IMAGES) if bundle.spec.image else settings.window_rows
        self._pipeline = pipeline
        self._batches = batches

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[InputOutcome]:
        async with self._batches.window(len(inputs)) as window:
            return await run_together(self._infer_row(window, row, input) for row, input in enumerate(inputs))

    async def _infer_row(self, window: BatchWindow, row: int, input: TaskInput) -> InputOutcome:
        call = Call(priority=Priority.PRIORITY_BULK)
        request = InferenceRequest(call, self.model.name, self.model.version, pack_input(input))
        with self._batches.row(window, row):
            try:
                answer = await self._pipeline.infer(request)
            except _OF_ROWS as error:
                return error
        usage = answer.usage
        return InputAnswer(answer.result.message, usage.tokens, usage.truncated_tokens, usage.padded_tokens)


def find_bundle(repository: Path, model: str, version: str = "", trusted_keys: Path | None = None) -> Bundle:
    """Finds a version of a model by its number or alias; by default the registry's choice, or the newest.

    `trusted_keys`: see read_trusted_repository. Raises SetupError.
    """
    bundles = {bundle.key: bundle for bundle in read_trusted_repository(repository, trusted_keys)}
    table = ModelTable(bundles, FolderRepository(repository).read_registry().routes)
    try:
        return table.find(model, version)
    except (ModelNotFound, InvalidInput, Unavailable) as error:
        raise SetupError(f"--repository {repository}: {error.message}") from error


def facts_of(bundle: Bundle, settings: TransformSettings) -> ModelFacts:
    """Returns the facts of a model, with the settings that determine its batches."""
    executor = settings.executor
    batching = (
        f"{bundle.artifact(executor.backend).backend}: {settings.window_rows} rows, "
        f"{executor.max_batch_size} sequences, {executor.max_batch_tokens} tokens"
    )
    spec, prompts = bundle.spec, bundle.spec.public_facts.get("prompt_names", ())
    return ModelFacts(
        name=spec.name,
        version=str(spec.version),
        digest=bundle.digest,
        tasks=spec.tasks,
        batching=batching,
        prompt_names=prompts,
    )


@asynccontextmanager
async def running_near_engine(
    bundle: Bundle, settings: TransformSettings, observe: Callable[[Execute], Execute] = lambda execute: execute
) -> AsyncIterator[NearEngine]:
    """Yields the engine, loaded and warmed up. `observe`: wraps the function that computes a batch.

    Raises SetupError if the bundle cannot run here.
    """
    telemetry = Telemetry()
    async with AsyncExitStack() as stack:
        running = running_executor([bundle], settings.executor, telemetry, model_class=WholeItemModel)
        executor = await stack.enter_async_context(running)
        running_texts = running_tokenizer([bundle], settings.tokenizer, telemetry, settings.redis)
        tokenizer = await stack.enter_async_context(running_texts)
        postprocessor = await stack.enter_async_context(running_postprocessor([bundle]))
        # Results are not cached: the last bits of a result from another batch may differ.
        models = open_gateway_models(telemetry.meters, lambda bundle: False)
        await stack.enter_async_context(running_models(models, [bundle]))
        batches = BatchMaker(observe(executor.execute), bundle, settings.executor)
        stages = Stages(tokenizer.tokenize, batches.execute, postprocessor.postprocess)
        yield NearEngine(bundle, Pipeline(models, stages, settings.pipeline, telemetry), batches, settings)
