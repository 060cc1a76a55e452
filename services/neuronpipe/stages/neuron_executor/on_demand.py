"""Models within the memory that they may take, loaded at start or when items for them come.

Where memory is short, those that were used longest ago make room. A model in use is never unloaded: one that is needed
without a pause keeps its place, and what waits for room waits until its callers' deadlines. One model is loaded at a
time.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.errors import NeuronpipeError, Overloaded, SetupError, Unavailable
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log_fault, log_warning
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.stages.neuron_executor.devices import Devices
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.generation.engine import Generator
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks import TASKS

LoadedModel = ExecutorModel | Generator
OpenModel = Callable[[Bundle], AbstractAsyncContextManager[LoadedModel]]


class ModelMemory:
    """What loaded models take: the files that the back end reads, and of a model that generates its key-value cache. It
    is the memory of the host with openvino, and that of the device with others.
    """

    def __init__(self, settings: EngineSettings, meters: Meters) -> None:
        self._settings = settings
        self._meters = meters
        self._taken: dict[ModelKey, int] = {}

    def size_of(self, bundle: Bundle) -> int:
        """The bytes of a model. Raises SetupError for one that can never be loaded, as it is larger than the limit."""
        artifact = bundle.artifact(self._settings.backend)
        try:
            size_bytes = sum((bundle.folder / name).stat().st_size for name in artifact.files)
        except OSError as error:
            raise SetupError(f"{bundle.folder}: {error.filename} cannot be read; compile the model again") from error
        if TASKS[bundle.spec.task].generates and artifact.backend != "neuronx":  # whose files have the cache
            size_bytes += self._settings.kv_cache_bytes
        if 0 < self._settings.max_model_memory_bytes < size_bytes:
            raise SetupError(
                f"model {bundle.spec.name!r} version {bundle.spec.version}: takes {size_bytes:,} bytes, the limit for "
                f"all models is {self._settings.max_model_memory_bytes:,} (--max-model-memory-bytes)"
            )
        return size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes more."""
        limit = self._settings.max_model_memory_bytes
        return not limit or sum(self._taken.values()) + size_bytes <= limit

    def take(self, key: ModelKey, size_bytes: int) -> None:
        """Counts a model that is about to be loaded."""
        self._taken[key] = size_bytes
        self._show()

    def give_back(self, key: ModelKey) -> None:
        """Counts it no more."""
        del self._taken[key]
        self._show()

    def checked(self, open_model: OpenModel) -> OpenModel:
        """Opens models, and raises SetupError for one for which there is no room beside the others."""

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


# After a model could not be loaded, items for it fail for so long before it is tried again.
_PAUSE_S = 1.0


class OnDemandModel:
    """A model that is there, loaded or not. Made by `OnDemandModels`."""

    def __init__(self, bundle: Bundle, size_bytes: int, owner: "OnDemandModels") -> None:
        self.bundle = bundle
        self.key = ModelKey(*bundle.key)
        self.size_bytes = size_bytes
        self.uses = 0
        self.loaded: LoadedModel | None = None
        # While it is being loaded, or waits for that.
        self.loading: asyncio.Future[LoadedModel | NeuronpipeError] | None = None
        self.fault = ""
        self.failed_s = 0.0
        self.leaves = asyncio.Event()
        self.has_left = asyncio.Event()
        self._owner = owner

    @asynccontextmanager
    async def use(self) -> AsyncIterator[LoadedModel]:
        """The model, which stays loaded while the block runs. It is waited for if it must be loaded first.

        Raises Unavailable where it cannot be loaded, and Overloaded where too many wait for it.
        """
        self.uses += 1
        try:
            yield self._owner.touch(self) or await self._owner.load(self)
        finally:
            self.uses -= 1
            if not self.uses:
                self._owner.note_unused()


class OnDemandModels:
    """Loads and unloads models. `work` must run; `tell` gets the models that are not loaded, and whether they are being
    loaded.
    """

    def __init__(
        self,
        open_model: OpenModel,
        memory: ModelMemory,
        max_waiting: int,
        meters: Meters,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`max_waiting`: items that may wait for one model to be loaded. `start`: runs a task beside."""
        self._open_model = open_model
        self._memory = memory
        self._max_waiting = max_waiting
        self._meters = meters
        self._start = start
        self._models: dict[ModelKey, OnDemandModel] = {}
        self._used: OrderedDict[OnDemandModel, None] = OrderedDict()  # those that are loaded; the last one used is last
        self._wanted: OrderedDict[OnDemandModel, None] = OrderedDict()
        self._has_wanted = asyncio.Event()
        self._has_unused = asyncio.Event()
        self.tell: Callable[[Mapping[ModelKey, bool]], None] = lambda unloaded: None

    @asynccontextmanager
    async def open(self, bundle: Bundle) -> AsyncIterator[OnDemandModel]:
        """A model, which is loaded at its first use. Raises SetupError for one that can never be."""
        size_bytes = await asyncio.to_thread(self._memory.size_of, bundle)
        model = OnDemandModel(bundle, size_bytes, self)
        self._models[model.key] = model
        self._tell()
        try:
            yield model
        finally:
            if model in self._wanted:  # for callers that have all left
                del self._wanted[model]
            elif model.loading:
                await asyncio.wait([model.loading])
            if model.loaded:
                await self._unload(model)
            del self._models[model.key]
            self._tell()

    def touch(self, model: OnDemandModel) -> LoadedModel | None:
        """A model that is loaded, which is used now; None for another."""
        if model.loaded:
            self._used.move_to_end(model)
        return model.loaded

    async def load(self, model: OnDemandModel) -> LoadedModel:
        """Waits until a model is loaded; see OnDemandModel.use."""
        if time.monotonic() < model.failed_s + _PAUSE_S:
            raise Unavailable(model.fault)
        if model.uses > self._max_waiting:
            name, version = model.key
            raise Overloaded(
                f"{self._max_waiting} items wait until model {name!r} version {version} is loaded, the limit (the "
                "executor's max_queue_sequences)",
                1.0,
            )
        if model.loading is None:
            model.loading = asyncio.get_running_loop().create_future()
            self._wanted[model] = None
            self._has_wanted.set()
            self._tell()
        began_ns = time.monotonic_ns()
        outcome = await asyncio.shield(model.loading)
        self._meters.histogram(Metrics.MODEL_WAIT, *_labels(model)).record(time.monotonic_ns() - began_ns)
        if isinstance(outcome, NeuronpipeError):
            raise Unavailable(outcome.message)
        return outcome

    def note_unused(self) -> None:
        """A model is not in use any more."""
        self._has_unused.set()

    async def work(self) -> None:
        """Loads what is wanted, in that order, until it is cancelled."""
        while True:
            await self._has_wanted.wait()
            self._has_wanted.clear()
            while self._wanted:
                model, _ = self._wanted.popitem(last=False)
                outcome = await self._load(model)
                if loading := model.loading:
                    model.loading = None
                    loading.set_result(outcome)
                self._tell()

    async def _load(self, model: OnDemandModel) -> LoadedModel | NeuronpipeError:
        while not self._memory.has_room(model.size_bytes):
            if not model.uses:
                return Unavailable("load cancelled: all requests for the model have ended")
            self._has_unused.clear()
            unused = next((one for one in self._used if not one.uses), None)
            if unused:
                await self._unload(unused)
            else:
                await self._has_unused.wait()
        model.leaves.clear()
        model.has_left.clear()
        opened: asyncio.Future[LoadedModel | NeuronpipeError] = asyncio.get_running_loop().create_future()
        self._memory.take(model.key, model.size_bytes)
        self._start(self._live(model, opened))
        self._tell()
        return await opened

    async def _live(self, model: OnDemandModel, opened: "asyncio.Future[LoadedModel | NeuronpipeError]") -> None:
        """Has a model loaded until it leaves. One task opens and closes it."""
        try:
            async with self._open_model(model.bundle) as loaded:
                model.loaded = loaded
                self._used[model] = None
                self._count(model, "loaded")
                opened.set_result(loaded)
                await model.leaves.wait()
            self._count(model, "unloaded")
        except Exception as fault:
            if opened.done():  # it could not be closed
                raise
            opened.set_result(self._failed(model, fault))
        finally:
            self._memory.give_back(model.key)
            model.has_left.set()

    async def _unload(self, model: OnDemandModel) -> None:
        """Unloads a model that nobody uses."""
        model.loaded = None
        del self._used[model]
        self._tell()
        model.leaves.set()
        await model.has_left.wait()

    def _failed(self, model: OnDemandModel, fault: Exception) -> NeuronpipeError:
        name, version = model.key
        known = isinstance(fault, SetupError)
        problem = str(fault) if known else f"{type(fault).__name__}; see the executor's log"
        model.fault = f"model {name!r} version {version} cannot be loaded: {problem}"
        model.failed_s = time.monotonic()
        self._count(model, "failed")
        if known:
            log_warning("a model cannot be loaded on demand", model=name, version=version, problem=problem)
        else:
            log_fault("a model cannot be loaded on demand", fault, model=name, version=version)
        return Unavailable(model.fault)

    def _count(self, model: OnDemandModel, outcome: str) -> None:
        self._meters.counter(Metrics.MODEL_LOADS, *_labels(model), outcome).add()

    def _tell(self) -> None:
        self.tell({key: bool(one.loading) for key, one in self._models.items() if not one.loaded})


def _labels(model: OnDemandModel) -> tuple[str, str]:
    return model.key.name, str(model.key.version)


def model_table(
    devices: Devices, settings: EngineSettings, telemetry: Telemetry
) -> ServedModels[LoadedModel | OnDemandModel]:
    """The table of an executor's models, which loads them when they are opened, or on demand."""
    memory = ModelMemory(settings, telemetry.meters)
    if not settings.models_on_demand:
        return ServedModels(memory.checked(devices.open_model))
    limit = settings.max_queue_sequences
    on_demand = OnDemandModels(devices.open_model, memory, limit, telemetry.meters, devices.start)
    table: ServedModels[LoadedModel | OnDemandModel] = ServedModels(on_demand.open)
    on_demand.tell = table.tell_unloaded
    devices.start(on_demand.work())
    return table
