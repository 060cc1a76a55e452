"""Models within the memory that they may take, loaded at start or with the first items for them.

If memory is short, the models that were used longest ago make room. A model in use is never unloaded: a model that is
needed without a pause keeps its place. A model that waits for room waits until its callers' deadlines, while smaller
models that have room are loaded. One model is loaded at a time, but a model whose back end takes longer than a
batch may delays no other model.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.errors import NeuronpipeError, Overloaded, SetupError, Unavailable
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log_fault, log_warning
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.background import run_apart
from neuronpipe.stages.neuron_executor.devices import Devices
from neuronpipe.stages.neuron_executor.errors import stopping
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks import TASKS

LoadedModel = ExecutorModel | TextGenerator
OpenModel = Callable[[Bundle], AbstractAsyncContextManager[LoadedModel]]


class ModelMemory:
    """The memory of loaded models: files that the back end reads, and the key-value cache of a generating model.

    The memory is the host's with openvino, and the device's with other back ends.
    """

    def __init__(self, settings: EngineSettings, meters: Meters) -> None:
        self._settings = settings
        self._meters = meters
        self._taken: dict[ModelKey, int] = {}

    def size_of(self, bundle: Bundle) -> int:
        """Returns the bytes of a model. Raises SetupError if they exceed the limit: it can never be loaded."""
        artifact = bundle.artifact(self._settings.backend)
        try:
            size_bytes = sum((bundle.folder / name).stat().st_size for name in artifact.files)
        except OSError as error:
            raise SetupError(f"{bundle.folder}: {error.filename} cannot be read; compile the model again") from error
        if TASKS[bundle.spec.task].generates and artifact.backend != "neuronx":  # Neuron's files contain the cache
            size_bytes += self._settings.kv_cache_bytes
        if 0 < self._settings.max_model_memory_bytes < size_bytes:
            raise SetupError(
                f"model {bundle.spec.name!r} version {bundle.spec.version}: takes {size_bytes:,} bytes, the limit for "
                f"all models is {self._settings.max_model_memory_bytes:,} (--max-model-memory-bytes)"
            )
        return size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Returns whether another `size_bytes` fit into the limit."""
        limit = self._settings.max_model_memory_bytes
        return not limit or sum(self._taken.values()) + size_bytes <= limit

    def take(self, key: ModelKey, size_bytes: int) -> None:
        """Counts a model that is about to be loaded."""
        self._taken[key] = size_bytes
        self._show()

    def give_back(self, key: ModelKey) -> None:
        """Stops counting a model that was unloaded."""
        del self._taken[key]
        self._show()

    def checked(self, open_model: OpenModel) -> OpenModel:
        """Wraps `open_model` so that it raises SetupError for a model that does not fit beside the others."""

        @asynccontextmanager
        async def opened(bundle: Bundle) -> AsyncIterator[LoadedModel]:
            key, size_bytes = ModelKey(*bundle.key), self.size_of(bundle)
            if not self.has_room(size_bytes):
                raise SetupError(
                    f"model {key.name!r} version {key.version}: takes {size_bytes:,} bytes beside "
                    f"{sum(self._taken.values()):,} of other models, the limit is "
                    f"{self._settings.max_model_memory_bytes:,} (--max-model-memory-bytes); --models-on-demand unloads "
                    "others"
                )
            self.take(key, size_bytes)
            try:
                async with open_model(bundle) as model:
                    yield model
            finally:
                self.give_back(key)

        return opened

    def _show(self) -> None:
        self._meters.show(
            Metrics.MODEL_MEMORY, {(key.name, str(key.version)): size_bytes for key, size_bytes in self._taken.items()}
        )


# After a model could not be loaded, items for it fail for this time before it is tried again.
_PAUSE_S = 1.0


class OnDemandModel:
    """A model of the repository, loaded or not. Made by `OnDemandModels`."""

    def __init__(
        self,
        bundle: Bundle,
        size_bytes: int,
        load: Callable[["OnDemandModel"], Awaitable[LoadedModel]],
        note_use: Callable[["OnDemandModel"], None],
        note_unused: Callable[[], None],
    ) -> None:
        """`load`: waits until the model is loaded. `note_use`: notes the use of a loaded model."""
        self.bundle = bundle
        self.key = ModelKey(*bundle.key)
        self.size_bytes = size_bytes
        self.uses = 0
        self.loaded: LoadedModel | None = None
        # Exists while the model is being loaded or waits for that.
        self.loading: asyncio.Future[LoadedModel | NeuronpipeError] | None = None
        self.fault = ""
        self.failed_s = 0.0
        # The task that keeps the model loaded, from its loading to its end.
        self.keeper: asyncio.Task[Any] | None = None
        self.must_unload = asyncio.Event()
        self.has_unloaded = asyncio.Event()
        self._load, self._note_use, self._note_unused = load, note_use, note_unused

    @asynccontextmanager
    async def use(self) -> AsyncIterator[LoadedModel]:
        """Yields the loaded model, which stays loaded while the block runs. Waits until it is loaded.

        Raises Unavailable if it cannot be loaded, and Overloaded if too many items wait for it.
        """
        self.uses += 1
        try:
            if self.loaded:
                self._note_use(self)
            yield self.loaded or await self._load(self)
        finally:
            self.uses -= 1
            if not self.uses:
                self._note_unused()


class OnDemandModels:
    """Loads and unloads models of devices. `work` must run. `tell_unloaded`: gets `unloaded` of ProcessModels."""

    def __init__(
        self,
        devices: Devices,
        memory: ModelMemory,
        settings: EngineSettings,
        meters: Meters,
        tell_unloaded: Callable[[Mapping[ModelKey, bool]], None],
    ) -> None:
        self._devices = devices
        self._memory = memory
        # The items that may wait for one model to be loaded.
        self._max_waiting = settings.max_queue_sequences
        # The time for which other models wait for a model that is being loaded.
        self._load_turn_s = settings.batch_limit_s
        self._meters = meters
        self._models: dict[ModelKey, OnDemandModel] = {}
        # The loaded models, least recently used first.
        self._by_last_use: OrderedDict[OnDemandModel, None] = OrderedDict()
        self._load_queue: OrderedDict[OnDemandModel, None] = OrderedDict()
        # Set when a model joins the load queue, and when a model is no longer in use.
        self._changed = asyncio.Event()
        self._tell_unloaded = tell_unloaded

    @asynccontextmanager
    async def open(self, bundle: Bundle) -> AsyncIterator[OnDemandModel]:
        """Yields a model that is loaded at its first use. Raises SetupError if it can never be loaded."""
        size_bytes = await run_apart(self._memory.size_of, bundle)
        model = OnDemandModel(bundle, size_bytes, self._wait, self._by_last_use.move_to_end, self._changed.set)
        self._models[model.key] = model
        self._report_unloaded()
        try:
            yield model
        finally:
            self._resolve(model, stopping())  # for callers that have all left
            if model.keeper:
                await self._unload(model)
            del self._models[model.key]
            self._report_unloaded()

    async def _wait(self, model: OnDemandModel) -> LoadedModel:
        """Waits until a model is loaded; see OnDemandModel.use."""
        if time.monotonic() < model.failed_s + _PAUSE_S:
            raise Unavailable(model.fault)
        if model.uses > self._max_waiting:
            name, version = model.key
            raise Overloaded(
                f"{self._max_waiting} items wait until model {name!r} version {version} is loaded, the limit", 1.0
            )
        if model.loading is None:
            model.loading = asyncio.get_running_loop().create_future()
            self._load_queue[model] = None
            self._changed.set()
            self._report_unloaded()
        began_ns = time.monotonic_ns()
        outcome = await asyncio.shield(model.loading)
        self._meters.histogram(Metrics.MODEL_WAIT, *_labels(model)).record(time.monotonic_ns() - began_ns)
        if isinstance(outcome, NeuronpipeError):
            raise Unavailable(outcome.message)
        return outcome

    async def work(self) -> None:
        """Loads the models of the load queue until it is cancelled."""
        while True:
            self._changed.clear()
            if model := self._next_to_load():
                await self._make_room_and_load(model)
            else:
                await self._changed.wait()

    def _next_to_load(self) -> OnDemandModel | None:
        """Returns the first queued model that has room once all unused models are unloaded."""
        for model in [queued for queued in self._load_queue if not queued.uses]:
            self._resolve(model, Unavailable("load cancelled: all requests for the model have ended"))
        unused_bytes = sum(loaded.size_bytes for loaded in self._by_last_use if not loaded.uses)
        fits = (model for model in self._load_queue if self._memory.has_room(model.size_bytes - unused_bytes))
        return next(fits, None)

    async def _make_room_and_load(self, model: OnDemandModel) -> None:
        """Makes room for a model and loads it, unless a model that should make room is used again meanwhile."""
        while not self._memory.has_room(model.size_bytes):
            unused = next((loaded for loaded in self._by_last_use if not loaded.uses), None)
            if unused is None:
                return
            await self._unload(unused)
        if model not in self._load_queue or model.loading is None:
            return
        del self._load_queue[model]
        model.must_unload.clear()
        model.has_unloaded.clear()
        self._memory.take(model.key, model.size_bytes)
        self._devices.start(self._keep_loaded(model))
        await asyncio.wait([model.loading], timeout=self._load_turn_s)

    async def _keep_loaded(self, model: OnDemandModel) -> None:
        """Loads a model, and unloads it when `must_unload` is set. One task does both."""
        model.keeper, has_opened = asyncio.current_task(), False
        try:
            if self._models.get(model.key) is not model:  # the model has left meanwhile
                return
            async with self._devices.open_model(model.bundle) as loaded:
                model.loaded, has_opened = loaded, True
                self._by_last_use[model] = None
                self._count(model, "loaded")
                self._resolve(model, loaded)
                await model.must_unload.wait()
            self._count(model, "unloaded")
        except Exception as fault:
            if has_opened:  # the model could not be closed
                raise
            self._resolve(model, self._failed(model, fault))
        finally:
            model.keeper = None
            self._memory.give_back(model.key)
            model.has_unloaded.set()
            self._changed.set()

    def _resolve(self, model: OnDemandModel, outcome: LoadedModel | NeuronpipeError) -> None:
        """Gives the outcome of loading a model to the callers that wait for it."""
        self._load_queue.pop(model, None)
        if loading := model.loading:
            model.loading = None
            loading.set_result(outcome)
        self._report_unloaded()

    async def _unload(self, model: OnDemandModel) -> None:
        """Unloads an unused model, or gives up loading it."""
        if model.loaded:
            model.loaded = None
            del self._by_last_use[model]
            self._report_unloaded()
        elif model.keeper and not model.must_unload.is_set():
            model.keeper.cancel()
        model.must_unload.set()
        await model.has_unloaded.wait()

    def _failed(self, model: OnDemandModel, fault: Exception) -> NeuronpipeError:
        name, version = model.key
        is_known = isinstance(fault, SetupError)
        problem = str(fault) if is_known else f"{type(fault).__name__}; see the executor's log"
        model.fault = f"model {name!r} version {version} cannot be loaded: {problem}"
        model.failed_s = time.monotonic()
        self._count(model, "failed")
        if is_known:
            log_warning("a model cannot be loaded on demand", model=name, version=version, problem=problem)
        else:
            log_fault("a model cannot be loaded on demand", fault, model=name, version=version)
        return Unavailable(model.fault)

    def _count(self, model: OnDemandModel, outcome: str) -> None:
        self._meters.counter(Metrics.MODEL_LOADS, *_labels(model), outcome).add()

    def _report_unloaded(self) -> None:
        self._tell_unloaded({key: bool(model.loading) for key, model in self._models.items() if not model.loaded})


def _labels(model: OnDemandModel) -> tuple[str, str]:
    return model.key.name, str(model.key.version)


def model_table(
    devices: Devices, settings: EngineSettings, telemetry: Telemetry
) -> ServedModels[LoadedModel | OnDemandModel]:
    """Makes the table of an executor's models, which loads them when they are opened, or on demand."""
    memory = ModelMemory(settings, telemetry.meters)
    table: ServedModels[LoadedModel | OnDemandModel]
    if settings.models_on_demand:
        table = ServedModels(lambda bundle: on_demand.open(bundle))
        on_demand = OnDemandModels(
            devices, memory, settings, telemetry.meters, lambda unloaded: table.tell(unloaded=unloaded)
        )
        devices.start(on_demand.work())
    else:
        table = ServedModels(memory.checked(devices.open_model))
    devices.start(devices.report_prepared(lambda prepared: table.tell(prepared=prepared)))
    return table
