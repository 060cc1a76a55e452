"""The versions of a process: loads the versions that the repository declares, one by one, beside the versions in
service.

A version that is no longer declared is unloaded when its successors are ready and no gateway or route of this process
needs it. A version that cannot be loaded leaves the others as they are, and is tried again.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from neuronpipe.bundles.folder_repository import LiveRepository
from neuronpipe.bundles.registry import REGISTRY_FILE
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ModelState, ServedModels
from neuronpipe.core.changes import Changes
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.background import run_apart, run_beside, start_apart, wait_for_event

# The pause between two attempts to load a version. It doubles each time, until the registry changes.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0
# Time for which the next version waits for reading this version's files, which takes cores. Fetching may take hours.
_PATIENCE_S = 5.0


class LiveVersion:
    """One version in this process, from its loading to its end. `LiveModels` makes it."""

    def __init__(self, key: ModelKey) -> None:
        self.key = key
        self.state = ModelState.LOADING
        # The error of the last attempt to load the version.
        self.fault: Exception | None = None
        self.task: asyncio.Task[Any] | None = None
        self.settled = asyncio.Event()
        self.leaves = asyncio.Event()
        self.ended = asyncio.Event()
        self.attempts = 1
        self.tried_s = time.monotonic()

    @property
    def problem(self) -> str:
        """Describes the error of the last attempt to load the version, or is empty."""
        if self.fault is None:
            return ""
        is_explained = isinstance(self.fault, SetupError)
        return str(self.fault) if is_explained else f"it could not be loaded ({type(self.fault).__name__}); see the log"

    @property
    def is_due(self) -> bool:
        """Whether a version that could not be loaded is to be tried again now."""
        pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.attempts - 1, 10))
        return self.ended.is_set() and time.monotonic() >= self.tried_s + pause_s


class LiveModels:
    """Keeps tables of served models equal to the declarations of the repository. Made by `running_live_models`."""

    def __init__(
        self,
        repository: LiveRepository,
        tables: Sequence[ServedModels[Any]],
        meters: Meters,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.repository = repository
        self.versions: dict[ModelKey, LiveVersion] = {}
        self._tables = tables
        self._meters = meters
        self._start = start
        self.changes = Changes()
        # Versions load one after another, because loading takes cores and memory, and a warm-up measures times.
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._is_ending = False
        for table in tables:
            table.changes.watch(self._wake.set)
            table.needs.changes.watch(self._wake.set)

    @property
    def keys(self) -> frozenset[ModelKey]:
        """The versions that this process serves, loads or unloads."""
        return frozenset(key for key, version in self.versions.items() if not version.ended.is_set())

    async def load_all(self) -> None:
        """Loads the declared versions. Raises the first error of loading if there is no registry."""
        self.update()
        for version in list(self.versions.values()):
            await version.settled.wait()
            if version.fault and not self.repository.registry.revision:
                raise version.fault

    async def follow(self) -> None:
        while True:
            before = self.repository.registry
            await run_apart(self.repository.look)
            if self.repository.registry is not before:
                for version in self.versions.values():
                    version.attempts, version.tried_s = 1, 0.0
                self._notify()
            self.update()
            self._wake.clear()
            await wait_for_event(self._wake, self.repository.look_every_s)

    def update(self) -> None:
        """Starts to load the declared versions that are missing, and tells the versions that may leave to leave."""
        if self._is_ending:
            return
        desired = self.repository.desired
        for key in sorted(desired):
            version = self.versions.get(key)
            if version is None or (version.fault and version.is_due) or (version.ended.is_set() and not version.fault):
                self._begin(key, version)
        for key, version in list(self.versions.items()):
            if version.ended.is_set() and key not in desired:
                self._remove(key)
            elif self._may_leave(key, desired):
                version.leaves.set()

    async def end(self) -> None:
        """Unloads all versions, the last one first, and waits until they are unloaded."""
        self._is_ending = True
        self.repository.end()
        for version in reversed(list(self.versions.values())):
            version.leaves.set()
            if version.task and version.state is ModelState.LOADING:
                version.task.cancel()
        for version in list(self.versions.values()):
            if version.task:  # a version without a task has opened nothing
                await version.ended.wait()

    def _may_leave(self, key: ModelKey, desired: frozenset[ModelKey]) -> bool:
        if key in desired or any(table.is_needed(key) for table in self._tables):
            return False
        if self.repository.registry.approval_of(key) != "approved":
            return True
        return all(self.versions[other].state is ModelState.READY for other in desired if other.name == key.name)

    def _begin(self, key: ModelKey, before: LiveVersion | None) -> None:
        version = self.versions[key] = LiveVersion(key)
        if before and before.fault:
            version.attempts = before.attempts + 1
        labels = key.name, str(key.version)
        for state in ModelState:
            is_in = partial(self._is_in, key, state)
            self._meters.gauge(Metrics.VERSION_STATE, is_in, *labels, state.value)
        self._meters.gauge(Metrics.VERSION_FETCHED, lambda: self._share_here(version), *labels)
        self._start(self._live(version, before.problem if before else ""))
        self._notify()

    def _is_in(self, key: ModelKey, state: ModelState) -> bool:
        return self.versions[key].state is state

    def _share_here(self, version: LiveVersion) -> float:
        is_fetched = version.state in (ModelState.READY, ModelState.DRAINING)
        return self.repository.fetched.get(version.key, float(is_fetched))

    def _remove(self, key: ModelKey) -> None:
        for state in ModelState:
            self._meters.remove(Metrics.VERSION_STATE, key.name, str(key.version), state.value)
        self._meters.remove(Metrics.VERSION_FETCHED, key.name, str(key.version))
        del self.versions[key]
        self._notify()

    async def _live(self, version: LiveVersion, former_problem: str) -> None:
        """Loads a version, waits, and unloads it, all in one task: an error inside the version ends this task."""
        version.task = asyncio.current_task()
        try:
            async with AsyncExitStack() as opened:  # closes the remaining tables even if closing one of them fails
                try:
                    await self._load(version, opened)
                except Exception as fault:
                    version.fault, version.tried_s = fault, time.monotonic()
                    self._tell_failure(version, former_problem)
                self._notify()
                if not version.fault:
                    await version.leaves.wait()
                    version.state = ModelState.DRAINING
                    self._notify()
        finally:
            if not version.fault:
                gc.unfreeze()  # the objects of the version are garbage now (platform/process/life.py)
            version.state = ModelState.FAILED if version.fault else ModelState.CLOSED
            version.settled.set()
            version.ended.set()
            self._notify()
            self._wake.set()

    async def _load(self, version: LiveVersion, opened: AsyncExitStack) -> None:
        key = version.key
        opened.callback(self.repository.release, key)
        async with self._turn:
            taking = asyncio.wrap_future(start_apart(partial(self.repository.take, key)))
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await asyncio.shield(taking)
            if taking.done():
                await self._open(version, taking.result(), opened)
                return
        bundle = await taking
        async with self._turn:
            await self._open(version, bundle, opened)

    async def _open(self, version: LiveVersion, bundle: Bundle, opened: AsyncExitStack) -> None:
        key = version.key
        for table in self._tables:
            await table.open(bundle)
            opened.push_async_callback(table.close, key)
        version.state = ModelState.READY
        version.settled.set()
        self._meters.counter(Metrics.VERSION_LOADS, key.name, str(key.version), "ready").add()
        if self.repository.registry.revision:
            log("version ready", model=key.name, version=key.version)

    def _tell_failure(self, version: LiveVersion, former_problem: str) -> None:
        key, fault = version.key, version.fault
        self._meters.counter(Metrics.VERSION_LOADS, key.name, str(key.version), "failed").add()
        if not self.repository.registry.revision or version.problem == former_problem:
            return
        event = "a version cannot be loaded; the versions in use stay"
        if isinstance(fault, SetupError):
            log_warning(event, model=key.name, version=key.version, problem=version.problem)
        elif fault:
            log_fault(event, fault, model=key.name, version=key.version)

    def _notify(self) -> None:
        problems = {key: version.problem for key, version in self.versions.items() if version.problem}
        for table in self._tables:
            table.tell(problems=problems)
        self.changes.notify()


@asynccontextmanager
async def running_live_models(
    repository: LiveRepository, tables: Sequence[ServedModels[Any]], meters: Meters
) -> AsyncIterator[LiveModels]:
    """Loads every declared version into each of the process's tables, in the order of `tables`, and closes all of them
    when the block ends.

    Raises the errors of loading if there is no registry, and any error that ends the task of a version.
    """
    meters.gauge(Metrics.FILE_LOADED, lambda: not repository.problem, REGISTRY_FILE)
    async with run_beside() as start:
        live = LiveModels(repository, tables, meters, start)
        try:
            await live.load_all()
            start(live.follow())
            yield live
        finally:
            await live.end()
