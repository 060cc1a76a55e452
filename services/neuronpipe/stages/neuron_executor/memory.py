"""The memory that an executor's models may take."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.generation.engine import Generator
from neuronpipe.stages.neuron_executor.settings import EngineSettings
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
