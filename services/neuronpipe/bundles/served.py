"""The models that a process serves. Each model is opened and closed on its own; their table is replaced as a whole."""

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

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


class _Lifetime:
    """The time for which the resource of a model and its adapters is open, and the number of blocks that use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ModelState.LOADING
        self.uses = 0
        self.is_unused = asyncio.Event()
        self.is_unused.set()
        self._stack = AsyncExitStack()

    async def open(self, resource: AbstractAsyncContextManager[ResourceT]) -> ResourceT:
        opened = await self._stack.enter_async_context(resource)
        self.state = ModelState.READY
        return opened

    async def close(self) -> None:
        """Waits until the resource is unused, and closes it."""
        self.state = ModelState.DRAINING
        await self.is_unused.wait()
        self.state = ModelState.CLOSED
        await self._stack.aclose()


class ServedModel(Generic[ResourceT]):
    """One version of a model or of its adapter, and as a context manager the resource that this process uses for it."""

    def __init__(self, bundle: Bundle, resource: ResourceT, lifetime: _Lifetime) -> None:
        self.bundle, self.resource, self.lifetime = bundle, resource, lifetime

    @property
    def spec(self) -> ModelSpec:
        return self.bundle.spec

    @property
    def key(self) -> ModelKey:
        return ModelKey(*self.bundle.key)

    @property
    def state(self) -> ModelState:
        return self.lifetime.state

    def __enter__(self) -> ResourceT:
        """Returns the resource, open until the block ends. Raises Unavailable if the model is not ready."""
        lifetime = self.lifetime
        if lifetime.state is not ModelState.READY:
            raise Unavailable(f"{lifetime.name} is {lifetime.state.value}")
        if not lifetime.uses:
            lifetime.is_unused.clear()
        lifetime.uses += 1
        return self.resource

    def __exit__(self, *_: object) -> None:
        lifetime = self.lifetime
        lifetime.uses -= 1
        if not lifetime.uses:
            lifetime.is_unused.set()


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
        self._models: list[ServedModel[ResourceT]] = []
        self.table: ModelTable[ServedModel[ResourceT]] = ModelTable({})
        self.needs = ModelNeeds()
        self.changes = Changes()  # the table, or the announced models
        self._opening: set[ModelKey] = set()
        # The facts about the models that the table lacks, as `tell` sets them. Replaced on every change.
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

    def is_loading(self, key: ModelKey) -> bool | None:
        """Returns whether a model that is not in memory is being loaded; None for a model in memory."""
        return self._told.unloaded.get(key)

    def tell(self, **facts: Any) -> None:
        """Sets `problems`, `unloaded` or `prepared` of `announced`."""
        told = replace(self._told, **facts)
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
        key = ModelKey(*bundle.key)
        lifetime = _Lifetime(f"model {key.name!r} version {key.version}")
        if key in self.keys | self._opening:
            raise SetupError(f"{bundle.folder}: {lifetime.name} is served already")
        self._opening.add(key)
        try:
            resource = await lifetime.open(self._open_model(bundle))
        finally:
            self._opening.remove(key)
        self._replace([*self._models, ServedModel(bundle, resource, lifetime)])

    async def close(self, key: ModelKey) -> None:
        """Stops serving a model, waits until it is unused, and unloads it."""
        (closing,) = [model for model in self._models if model.key == key]
        self._replace([model for model in self._models if model.key != key])
        await closing.lifetime.close()

    def _replace(self, models: list[ServedModel[ResourceT]], routes: Mapping[str, ModelRoute] | None = None) -> None:
        routes = self.table.declared_routes if routes is None else routes
        self._models = models
        adapters = (adapter for model in models for adapter in self._adapters_of(model))
        complete = (model for model in models if not model.spec.needs_adapter)
        entries = {(model.spec.name, model.spec.version): model for model in (*complete, *adapters)}
        self.table = ModelTable(entries, routes, self._other_names(model.bundle for model in models))
        self.changes.notify()

    def _adapters_of(self, model: ServedModel[ResourceT]) -> Iterator[ServedModel[ResourceT]]:
        for number in range(1, 1 + len(model.spec.adapters)):
            bundle = model.bundle.adapted(number)
            yield ServedModel(bundle, self._adapt(model.resource, bundle), model.lifetime)


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
