"""The models that a process serves. Each model is opened and closed on its own; their table is replaced as a whole."""

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.changes import Changes
from neuronpipe.core.errors import SetupError, Unavailable
from neuronpipe.core.items import ModelKey
from neuronpipe.core.model import NO_ROUTE, ModelRoute, ModelSpec, ModelTable
from neuronpipe.core.streams import ModelNeeds, Preparation, ProcessModels

ResourceT = TypeVar("ResourceT")


class ModelState(enum.Enum):
    """The states of a served model, in order. `failed` is the state of a model that could not be loaded."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class ServedModel(ABC, Generic[ResourceT]):
    """One version of a model or of its adapter, and as a context manager the resource that this process uses for it."""

    resource: ResourceT

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    @property
    def spec(self) -> ModelSpec:
        return self.bundle.spec

    @property
    def key(self) -> ModelKey:
        return ModelKey(*self.bundle.key)

    @property
    @abstractmethod
    def state(self) -> ModelState: ...

    @abstractmethod
    def __enter__(self) -> ResourceT:
        """Returns the resource, open until the block ends. Raises Unavailable if the model is not ready."""

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class _OpenModel(ServedModel[ResourceT]):
    """A model with a resource of its own."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._state = ModelState.LOADING
        self._stack = AsyncExitStack()
        self._uses = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()

    @property
    def state(self) -> ModelState:
        return self._state

    def __enter__(self) -> ResourceT:
        if self._state is not ModelState.READY:
            raise Unavailable(f"model {self.spec.name!r} version {self.spec.version} is {self.state.value}")
        if not self._uses:
            self._is_unused.clear()
        self._uses += 1
        return self.resource

    def __exit__(self, *_: object) -> None:
        self._uses -= 1
        if not self._uses:
            self._is_unused.set()

    async def open(self, resource: AbstractAsyncContextManager[ResourceT]) -> None:
        self.resource = await self._stack.enter_async_context(resource)
        self._state = ModelState.READY

    async def close(self) -> None:
        self._state = ModelState.DRAINING
        await self._is_unused.wait()
        self._state = ModelState.CLOSED
        await self._stack.aclose()


class _ServedAdapter(ServedModel[ResourceT]):
    """An adapter of an open model. Requests that name the adapter use the model."""

    def __init__(self, base: _OpenModel[ResourceT], bundle: Bundle, resource: ResourceT) -> None:
        super().__init__(bundle)
        self._base = base
        self.resource = resource

    @property
    def state(self) -> ModelState:
        return self._base.state

    def __enter__(self) -> ResourceT:
        self._base.__enter__()
        return self.resource

    def __exit__(self, *_: object) -> None:
        self._base.__exit__()


class ServedModels(Generic[ResourceT]):
    """The models of a process. `table` is a snapshot with adapters, which is replaced on every change."""

    def __init__(
        self,
        open_model: Callable[[Bundle], AbstractAsyncContextManager[ResourceT]],
        other_names: Callable[[Iterable[Bundle]], Mapping[str, str]] = lambda bundles: {},
        adapt: Callable[[ResourceT, Bundle], ResourceT] = lambda resource, bundle: resource,
    ) -> None:
        """`other_names`: returns further names by which requests may call these models. `adapt`: makes the resource of
        an adapter from the resource of its base, for the bundle as the adapter describes it.
        """
        self._open_model = open_model
        self._other_names = other_names
        self._adapt = adapt
        self._models: list[_OpenModel[ResourceT]] = []
        self.table: ModelTable[ServedModel[ResourceT]] = ModelTable({})
        self.needs = ModelNeeds()
        self.changes = Changes()  # the table, or the announced models
        self._opening: set[ModelKey] = set()
        # The facts about the models that the table lacks, as the methods tell_… set them. Replaced on every change.
        self._told = ProcessModels()

    @property
    def keys(self) -> frozenset[ModelKey]:
        """The models, and their adapters."""
        return frozenset(model.key for model in (*self._models, *self.table))

    @property
    def bases(self) -> list[ModelKey]:
        """The models without their adapters, sorted."""
        return sorted(model.key for model in self._models)

    @property
    def announced(self) -> ProcessModels:
        """The models as the process announces them to gateways."""
        return replace(self._told, ready=self.keys, digests=self.digests)

    @property
    def digests(self) -> Mapping[ModelKey, str]:
        """The digests of the bundles of the models, and of their adapters."""
        return {model.key: model.bundle.digest for model in (*self._models, *self.table)}

    def has(self, key: ModelKey) -> bool:
        return key in self.keys

    def problem_of(self, key: ModelKey) -> str:
        """Returns the problem of a version that should be served and is not; empty if there is none."""
        return self._told.problems.get(key, "")

    def tell_problems(self, problems: Mapping[ModelKey, str]) -> None:
        """Sets the problems of declared versions that are not served."""
        self._tell(replace(self._told, problems=problems))

    def tell_unloaded(self, unloaded: Mapping[ModelKey, bool]) -> None:
        """Sets the models that are not in memory, and whether each is being loaded."""
        self._tell(replace(self._told, unloaded=unloaded))

    def is_loading(self, key: ModelKey) -> bool | None:
        """Returns whether a model that is not in memory is being loaded; None for a model in memory."""
        return self._told.unloaded.get(key)

    def tell_prepared(self, prepared: Mapping[ModelKey, Preparation]) -> None:
        self._tell(replace(self._told, prepared=prepared))

    def _tell(self, told: ProcessModels) -> None:
        if told != self._told:
            self._told = told
            self.changes.notify()

    def preparation_of(self, key: ModelKey) -> Preparation:
        """Returns the progress in preparing a version."""
        return self._told.prepared.get(key, Preparation())

    def is_needed(self, key: ModelKey) -> bool:
        """Returns whether a gateway may still send items for a model, or a route of this table leads to it."""
        is_routed = key.version in self.table.routes.get(key.name, NO_ROUTE).versions
        return is_routed or self.needs.has(key)

    def route(self, routes: Mapping[str, ModelRoute]) -> None:
        if routes != self.table.declared_routes:
            self._replace(self._models, routes)

    async def open(self, bundle: Bundle) -> None:
        """Loads a model, then serves it. Raises SetupError if it is served already, and the errors of loading."""
        model: _OpenModel[ResourceT] = _OpenModel(bundle)
        if model.key in self.keys | self._opening:
            name, version = model.key
            raise SetupError(f"{bundle.folder}: model {name!r} version {version} is served already")
        self._opening.add(model.key)
        try:
            await model.open(self._open_model(bundle))
        finally:
            self._opening.remove(model.key)
        self._replace([*self._models, model])

    async def close(self, key: ModelKey) -> None:
        """Stops serving a model, waits until it is unused, and unloads it."""
        (closing,) = [model for model in self._models if model.key == key]
        self._replace([model for model in self._models if model.key != key])
        await closing.close()

    def _replace(self, models: list[_OpenModel[ResourceT]], routes: Mapping[str, ModelRoute] | None = None) -> None:
        routes = self.table.declared_routes if routes is None else routes
        self._models = models
        adapters = (adapter for model in models for adapter in self._adapters_of(model))
        complete = (model for model in models if not model.spec.needs_adapter)
        entries = {(model.spec.name, model.spec.version): model for model in (*complete, *adapters)}
        self.table = ModelTable(entries, routes, self._other_names(model.bundle for model in models))
        self.changes.notify()

    def _adapters_of(self, model: _OpenModel[ResourceT]) -> Iterator[_ServedAdapter[ResourceT]]:
        for number in range(1, 1 + len(model.spec.adapters)):
            bundle = model.bundle.adapted(number)
            yield _ServedAdapter(model, bundle, self._adapt(model.resource, bundle))


@asynccontextmanager
async def running_models(
    models: ServedModels[ResourceT], bundles: list[Bundle]
) -> AsyncIterator[ServedModels[ResourceT]]:
    """Opens these models, and in the end closes all models of the table, in reverse order of names and versions."""
    async with AsyncExitStack() as closing:  # closes the remaining models even if closing one of them fails
        try:
            for bundle in bundles:
                await models.open(bundle)
            yield models
        finally:
            for key in models.bases:
                closing.push_async_callback(models.close, key)
