"""The devices of this process, and their models, which are opened, warmed up and closed one by one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.background import run_beside
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.backends import load_backend, load_decoder
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, CoreLost, compute
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.forecast import BatchTime, BatchTimes
from neuronpipe.stages.neuron_executor.generation.engine import Generator
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, Run
from neuronpipe.stages.neuron_executor.runtimes.host import cpu_threads
from neuronpipe.stages.neuron_executor.scheduler import DeviceScheduler
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.inputs.kind import input_kind
from neuronpipe.tasks.text_generation import GenerationFacts


async def warm_up(backend: Backend, bundle: Bundle, device: DeviceScheduler) -> BatchTimes:
    """Runs every bucket, or two different batches, on every core, in turn with the device's other models.

    Batches that run alone begin with the same estimate, which then follows their own times. Raises SetupError if one
    cannot run, or if no core is left.
    """
    warming = _WarmUp(backend, bundle, device)
    estimates = [BatchTime()]
    if backend.cores > 1 and backend.buckets is None:
        estimates.append(BatchTime())
    try:
        for rows, tokens in warming.shapes():
            for core in range(backend.cores):
                await warming.run_on(core, rows, tokens)
            # The faster one, because all services of a machine may start at once.
            seconds = min([await warming.time(rows, tokens) for _ in range(2)])
            for estimate in estimates:
                estimate.anchor(rows * tokens, seconds)
    except BackendError as error:
        raise SetupError(f"{bundle.folder}: the back end cannot run a warm-up batch: {error}") from error
    return BatchTimes(estimates[0], estimates[-1])


class _WarmUp:
    """The warm-up of one model. Raises BackendError, and CoreLost with the last core only."""

    def __init__(self, backend: Backend, bundle: Bundle, device: DeviceScheduler) -> None:
        self._backend, self._name, self._device = backend, bundle.spec.name, device
        self._kind = input_kind(bundle.spec)

    def shapes(self) -> list[tuple[int, int]]:
        """Rows and padded tokens of each batch."""
        if self._backend.buckets:
            return [(bucket.batch, bucket.tokens) for bucket in self._backend.buckets.buckets]
        return [(rows, self._backend.round_tokens(tokens)) for rows, tokens in self._kind.warm_up_shapes()]

    async def run_on(self, core: int, rows: int, tokens: int) -> float | None:
        """Runs the shortest sequences. Returns the seconds that they took; None if the core is lost."""
        left = [one for one in range(self._backend.cores) if not self._device.cores.is_lost(one)]
        if core not in left:
            return None
        inputs = self._kind.pad([self._kind.shortest()] * rows, tokens)
        try:
            async with self._device.reserved([core]):
                began_s = time.monotonic()
                await compute(self._backend, core, inputs)
                return time.monotonic() - began_s
        except CoreLost as fault:
            self._device.lose(core, self._name, fault)
            if not self._device.cores.left:
                raise
            return None

    async def time(self, rows: int, tokens: int) -> float:
        """The seconds that a batch takes on the first core that is not lost."""
        for core in range(self._backend.cores):
            if (seconds := await self.run_on(core, rows, tokens)) is not None:
                return seconds
        raise CoreLost("no core is left")


class Devices:
    """A scheduler for each back end in use, because a back end owns its cores. Made by `running_devices`.

    `start`: runs a task beside, which ends with the devices.
    """

    def __init__(
        self, settings: EngineSettings, telemetry: Telemetry, start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self.start = start
        self._schedulers: dict[str, DeviceScheduler] = {}
        self._limits = Limits(settings.max_batch_size, settings.max_batch_tokens, settings.max_queue_sequences)

    def open_model(self, bundle: Bundle) -> AbstractAsyncContextManager[ExecutorModel | Generator]:
        """Loads a model; see the two."""
        return self.open_generator(bundle) if TASKS[bundle.spec.task].generates else self.open_batches(bundle)

    @asynccontextmanager
    async def open_generator(self, bundle: Bundle) -> AsyncIterator[Generator]:
        """Loads a model that generates, and computes a first step. It has a thread and a key-value cache of its own."""
        began_ns = time.monotonic_ns()
        name = bundle.artifact(self._settings.backend).backend
        model = await asyncio.to_thread(self._load_decoder, bundle)
        await asyncio.to_thread(_warm_up, model, bundle.spec, self._settings.step_tokens)
        observer = GenerationObserver(self._telemetry, bundle.spec, name)
        generator = Generator(
            model,
            bundle.spec,
            self._telemetry,
            observer,
            bundle.tokenizer_json,
            max_sequences=self._limits.max_batch_size,
            step_tokens=self._settings.step_tokens,
            max_queue_sequences=self._limits.max_queue_sequences,
            max_prompt_wait_s=self._settings.max_prompt_wait_s,
            step_limit_s=self._settings.batch_limit_s,
            prompt_lookup_tokens=self._settings.prompt_lookup_tokens,
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
        """Loads and warms up a model while others are served.

        After the block, its batches are waited for, and it is unloaded. Raises SetupError for a bundle that cannot run
        here.
        """
        began_ns = time.monotonic_ns()
        backend = await asyncio.to_thread(self._load, bundle)
        try:
            name = bundle.artifact(self._settings.backend).backend
            scheduler = self._scheduler(name, backend)
            times = await warm_up(backend, bundle, scheduler)
            log("model ready", model=bundle.spec.name, version=bundle.spec.version, cores=scheduler.cores.left)
            observer = BatchObserver(self._telemetry, bundle.spec, name, backend.cores, lambda: backend.part_ns)
            observer.ready(time.monotonic_ns() - began_ns)
            model = scheduler.join(backend, bundle.spec, self._limits, times, observer)
            if self._settings.whole_items:
                model.keep_items_whole()
            try:
                yield model
            finally:
                await scheduler.leave(model)
        finally:
            await asyncio.to_thread(backend.close)

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
            for worker in scheduler.workers():
                self.start(worker)
        return self._schedulers[name]

    def _load(self, bundle: Bundle) -> Backend:
        with self._request(bundle, self._settings.threads) as (name, request):
            return load_backend(name, request)

    @contextmanager
    def _request(self, bundle: Bundle, threads: int) -> Iterator[tuple[str, BackendRequest]]:
        """The back end of a bundle, and its parameters."""
        settings, artifact = self._settings, bundle.artifact(self._settings.backend)
        with bundle.artifact_files(artifact) as files:
            request = BackendRequest(
                bundle.spec,
                files,
                artifact.properties,
                cores=settings.core_count,
                pipeline_cores=artifact.pipeline_cores,
                cores_per_replica=settings.cores_per_replica,
                threads=threads,
                in_flight=settings.in_flight,
                buckets=artifact.buckets,
                versions=artifact.versions,
            )
            yield artifact.backend, request


def _text_tokens(spec: ModelSpec) -> int:
    """The most tokens that a sequence holds besides those of its source, with what comes before them."""
    facts = GenerationFacts.of(spec)
    return facts.max_text_tokens + len(facts.decoder_start_token_ids)


def _warm_up(model: DecoderModel, spec: ModelSpec, step_tokens: int) -> None:
    """Computes a step with a prompt and a step after it, so that all is allocated when the first request comes."""
    start = GenerationFacts.of(spec).decoder_start_token_ids
    source = range(1) if start else range(0)
    if start:
        model.read([0], source)
    count = min(len(start) or step_tokens, spec.max_tokens - 1, (model.blocks - len(source)) * model.block_tokens - 1)
    blocks = range(len(source), model.blocks)
    model.compute([Run([0] * count, 0, blocks, 1, len(source), source)])
    model.compute([Run([0], count, blocks, 1, len(source), source)])


@asynccontextmanager
async def running_devices(settings: EngineSettings, telemetry: Telemetry) -> AsyncIterator[Devices]:
    """Runs the devices until the block ends. Raises CoresLost if a device has no core left."""
    async with run_beside() as start:
        yield Devices(settings, telemetry, start)
