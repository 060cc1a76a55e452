"""The devices of this process and their models, which are opened, warmed up and closed separately."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.streams import Preparation
from neuronpipe.platform.process.background import run_beside
from neuronpipe.stages.neuron_executor.backends import load_backend, load_decoder
from neuronpipe.stages.neuron_executor.backends.base import (
    Backend,
    BackendError,
    BackendRequest,
    ByteBudget,
    CoreLost,
    compute,
)
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.forecast import BatchTime, BatchTimes
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.stages.neuron_executor.impairment import Impairment
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, DecoderRun
from neuronpipe.stages.neuron_executor.runtimes.host import cpu_threads
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.stages.neuron_executor.shapes import BatchShape, ShapeMenu
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.inputs.kind import input_kind
from neuronpipe.tasks.text_options import GenerationFacts

# Shapes that no request has had yet are prepared when the device has been idle for this time. So a caller who sends one
# request after another does not wait for them.
_IDLE_S = 0.25
# Texts of up to this length are computed one at a time before the model is ready.
_FIRST_TOKENS = 64
# Time limit for closing a back end, which may have to wait until another graph of a large model is compiled.
_CLOSE_LIMIT_S = 5.0
# The pause between two reports of how far models are prepared. Each report is sent to every gateway.
_REPORT_EVERY_S = 2.0


async def _measured_times(backend: Backend, bundle: Bundle, scheduler: DeviceScheduler) -> BatchTimes:
    """Warms up a model: runs every bucket, or two different batches, on every core, in turn with the other models.

    Returns the measured times. Batches that run alone begin with the same estimate, which then follows their own
    times. Raises SetupError if a batch cannot run, or if no core is left.
    """
    runner = _ShapeRunner(backend, bundle, scheduler)
    estimates = [BatchTime()]
    if backend.cores > 1 and isinstance(backend.shapes, ShapeMenu):
        estimates.append(BatchTime())
    try:
        for rows, tokens in runner.shapes():
            for core in range(backend.cores):
                await runner.run_on(core, rows, tokens)
            # The faster of two runs: services that start beside this one may slow a run.
            seconds = min([await runner.time(rows, tokens) for _ in range(2)])
            for estimate in estimates:
                estimate.anchor(rows * tokens, seconds)
    except BackendError as error:
        raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
    return BatchTimes(estimates[0], estimates[-1])


class _ShapeRunner:
    """Runs batches of one model that answer no request, one or more of each shape.

    Raises BackendError, and CoreLost only for the last core.
    """

    def __init__(self, backend: Backend, bundle: Bundle, scheduler: DeviceScheduler) -> None:
        self._backend, self._name, self._scheduler = backend, bundle.spec.name, scheduler
        self._kind = input_kind(bundle.spec)

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the rows and padded tokens of each batch."""
        shapes = self._backend.shapes
        if isinstance(shapes, BucketPlan):
            return [(bucket.batch, bucket.tokens) for bucket in shapes.buckets]
        return [(rows, shapes.round_tokens(tokens)) for rows, tokens in self._kind.warm_up_shapes()]

    async def run_on(self, core: int, rows: int, tokens: int, *, is_alone: bool = False) -> float | None:
        """Runs a batch of the shortest sequences. Returns its seconds, or None if the core is lost."""
        if self._scheduler.cores.is_lost(core):
            return None
        inputs = self._kind.pad([self._kind.shortest(tokens)] * rows, tokens)
        try:
            async with self._scheduler.reserved([core]):
                began_s = time.monotonic()
                await compute(self._backend, core, inputs, is_alone=is_alone)
                return time.monotonic() - began_s
        except CoreLost as fault:
            self._scheduler.lose(core, self._name, fault)
            if not self._scheduler.cores.left:
                raise
            return None

    async def time(self, rows: int, tokens: int) -> float:
        """Measures the seconds of a batch on the first core that is not lost."""
        for core in range(self._backend.cores):
            if (seconds := await self.run_on(core, rows, tokens)) is not None:
                return seconds
        raise CoreLost("no core is left")

    async def run_first(self, model: ExecutorModel, planned: Sequence[BatchShape]) -> None:
        """Computes the shapes of usual first requests: short texts, one at a time."""
        for shape in planned:
            if shape.is_alone and shape.tokens <= _FIRST_TOKENS:
                await self._run(model, shape)

    async def _run(self, model: ExecutorModel, shape: BatchShape) -> None:
        await self.run_on(shape.core, shape.rows, shape.tokens, is_alone=shape.is_alone)
        model.computed_shapes.add(shape)

    async def run_rest(self, model: ExecutorModel, planned: Sequence[BatchShape]) -> None:
        """Computes each planned shape that no request has had, after the first request, whenever the device is idle.

        So a model that is never used takes no memory for shapes.
        """
        await model.is_used.wait()
        try:
            for shape in planned:
                if shape not in model.computed_shapes:
                    await self._scheduler.idle(_IDLE_S)
                if shape not in model.computed_shapes:
                    await self._run(model, shape)
        except BackendError as error:
            log_fault("the other shapes of a model are prepared when requests have them", error, model=self._name)


class Devices:
    """The schedulers of the back ends in use, one each, because a back end owns its cores. Made by `running_devices`.

    `start`: runs a task in the background, which ends with the devices.
    """

    def __init__(
        self,
        settings: EngineSettings,
        telemetry: Telemetry,
        start: Callable[[Coroutine[Any, Any, None]], None],
        model_class: type[ExecutorModel],
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._model_class = model_class
        self.start = start
        self.impairment = Impairment(settings.impaired_limit_s)
        self._schedulers: dict[str, DeviceScheduler] = {}
        self._lone_graphs = ByteBudget(settings.lone_graph_bytes)
        self._prepared: dict[ModelKey, Callable[[], Preparation]] = {}
        self._limits = Limits(settings.max_batch_size, settings.max_batch_tokens, settings.max_queue_sequences)

    async def report_prepared(self, report: Callable[[Mapping[ModelKey, Preparation]], None]) -> None:
        """Reports how far the models are prepared, at intervals, until it is cancelled."""
        while True:
            report({key: prepared() for key, prepared in self._prepared.items()})
            await asyncio.sleep(_REPORT_EVERY_S)

    def open_model(self, bundle: Bundle) -> AbstractAsyncContextManager[ExecutorModel | TextGenerator]:
        """Loads a model; see `open_generator` and `open_batches`."""
        return self.open_generator(bundle) if TASKS[bundle.spec.task].generates else self.open_batches(bundle)

    @asynccontextmanager
    async def open_generator(self, bundle: Bundle) -> AsyncIterator[TextGenerator]:
        """Loads a model that generates, and computes a first step. The model has its own thread and key-value cache."""
        began_ns = time.monotonic_ns()
        name = bundle.artifact(self._settings.backend).backend
        loading, step_tokens = f"loading {_name(bundle)}", self._settings.step_tokens
        model = await self.impairment.call(loading, lambda: self._load_decoder(bundle))
        await self.impairment.call(loading, lambda: _run_first_steps(model, bundle.spec, step_tokens))
        observer = GenerationObserver(self._telemetry, bundle.spec, name)
        generator = TextGenerator(
            model=model,
            spec=bundle.spec,
            telemetry=self._telemetry,
            observer=observer,
            tokenizer_json=bundle.tokenizer_json,
            settings=self._settings,
        )
        self.start(generator.work())
        log("model ready", model=bundle.spec.name, version=bundle.spec.version, blocks=model.blocks)
        observer.ready(time.monotonic_ns() - began_ns)
        try:
            yield generator
        finally:
            await generator.close()

    @asynccontextmanager
    async def open_batches(self, bundle: Bundle) -> AsyncIterator[ExecutorModel]:
        """Loads and warms up a model while other models are served.

        After the block it waits for the model's batches and unloads the model, or gives up a back end that hangs.
        Raises SetupError if the bundle cannot run here.
        """
        began_ns = time.monotonic_ns()
        backend = await self.impairment.call(f"loading {_name(bundle)}", lambda: self._load(bundle))
        try:
            name = bundle.artifact(self._settings.backend).backend
            scheduler = self._scheduler(name, backend)
            times = await _measured_times(backend, bundle, scheduler)
            log("model ready", model=bundle.spec.name, version=bundle.spec.version, cores=scheduler.cores.left)
            observer = BatchObserver(self._telemetry, bundle.spec, name, backend.cores, lambda: backend.part_ns)
            observer.ready(time.monotonic_ns() - began_ns)
            model = self._model_class(
                backend=backend,
                spec=bundle.spec,
                limits=self._limits,
                shared=scheduler.shared,
                times=times,
                observer=observer,
            )
            scheduler.add_model(model)
            try:
                async with self._preparing_shapes(backend, bundle, scheduler, model):
                    yield model
            finally:
                await scheduler.remove_model(model)
        finally:
            await self._close(bundle, backend)

    @asynccontextmanager
    async def _preparing_shapes(
        self, backend: Backend, bundle: Bundle, scheduler: DeviceScheduler, model: ExecutorModel
    ) -> AsyncIterator[None]:
        """Prepares a model's shapes in the background until the block ends."""
        key = ModelKey(*bundle.key)
        if not (planned := model.planned_shapes()):
            yield
            return

        def prepared() -> Preparation:
            graphs, ready = backend.lone_graphs, model.computed_shapes.intersection(planned)
            return Preparation(len(planned), len(ready), len(graphs), sum(graphs.values()))

        model.observer.watch_shapes(prepared)
        self._prepared[key] = prepared
        runner = _ShapeRunner(backend, bundle, scheduler)
        try:
            try:
                await runner.run_first(model, planned)
            except BackendError as error:
                raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
            async with run_beside(runner.run_rest(model, planned)):
                yield
        finally:
            del self._prepared[key]

    async def _close(self, bundle: Bundle, backend: Backend) -> None:
        """Closes a back end within a time limit. A back end that hangs is given up; its batches are over by then."""
        limit_s = min(self._settings.batch_limit_s, _CLOSE_LIMIT_S)
        try:
            await self.impairment.call(f"unloading {_name(bundle)}", backend.close, limit_s)
        except SetupError as error:
            log_warning("a model is given up: its back end hangs", problem=str(error))

    def _load_decoder(self, bundle: Bundle) -> DecoderModel:
        with self._request(bundle, cpu_threads(self._settings.threads, 0)) as (name, request):
            return load_decoder(
                name,
                request,
                max_tokens=self._settings.max_batch_size * (bundle.spec.max_tokens + _text_tokens(bundle.spec)),
                max_bytes=self._settings.kv_cache_bytes,
            )

    def _scheduler(self, name: str, backend: Backend) -> DeviceScheduler:
        if name not in self._schedulers:
            self._schedulers[name] = scheduler = DeviceScheduler(
                backend.cores, backend.in_flight, self._settings.batch_limit_s
            )
            self.impairment.watch(scheduler.cores)
            for worker in scheduler.workers():
                self.start(worker)
        return self._schedulers[name]

    def _load(self, bundle: Bundle) -> Backend:
        with self._request(bundle, self._settings.threads) as (name, request):
            return load_backend(name, request)

    @contextmanager
    def _request(self, bundle: Bundle, threads: int) -> Iterator[tuple[str, BackendRequest]]:
        """Yields the back end of a bundle, and its parameters."""
        settings, artifact = self._settings, bundle.artifact(self._settings.backend)
        with bundle.artifact_files(artifact) as files:
            request = BackendRequest(
                bundle.spec,
                files,
                artifact.properties,
                cores=settings.core_count,
                pipeline_cores=artifact.pipeline_cores,
                threads=threads,
                in_flight=settings.in_flight,
                max_batch_tokens=settings.max_batch_tokens,
                lone_graphs=self._lone_graphs,
                buckets=artifact.buckets,
                versions=artifact.versions,
            )
            yield artifact.backend, request


def _name(bundle: Bundle) -> str:
    return f"model {bundle.spec.name!r} version {bundle.spec.version}"


def _text_tokens(spec: ModelSpec) -> int:
    """Returns the maximum number of tokens of a sequence's text, with the tokens before it and without its source."""
    facts = GenerationFacts.of(spec)
    return facts.max_text_tokens + len(facts.decoder_start_token_ids)


def _run_first_steps(model: DecoderModel, spec: ModelSpec, step_tokens: int) -> None:
    """Computes a step with a prompt and a step after it, so that all memory is allocated before the first request."""
    start = GenerationFacts.of(spec).decoder_start_token_ids
    source = range(1) if start else range(0)
    if start:
        model.read([0], source)
    count = min(len(start) or step_tokens, spec.max_tokens - 1, (model.blocks - len(source)) * model.block_tokens - 1)
    blocks = range(len(source), model.blocks)
    for token_ids, past in ([0] * count, 0), ([0], count):
        run = DecoderRun(
            token_ids=token_ids, past=past, blocks=blocks, scored=1, source_tokens=len(source), source_blocks=source
        )
        model.compute([run])


@asynccontextmanager
async def running_devices(
    settings: EngineSettings, telemetry: Telemetry, model_class: type[ExecutorModel] = ExecutorModel
) -> AsyncIterator[Devices]:
    """Runs the devices until the block ends. Raises CoresLost if a device has no core left."""
    async with run_beside() as start:
        yield Devices(settings, telemetry, start, model_class)
