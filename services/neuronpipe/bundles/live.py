"""The versions that a process has: what the repository declares, loaded one by one beside those that are served.

A version that shall not be served any more is unloaded when its successors are ready, and when nobody needs it: no
gateway that may still send items for it, and no route of this process. One that cannot be loaded leaves the others as
they are; it is tried again.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from neuronpipe.bundles.registry import REGISTRY_FILE
from neuronpipe.bundles.served import ModelState, ServedModels
from neuronpipe.bundles.sources import LiveRepository
from neuronpipe.core.background import run_beside
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics

# Between two attempts to load a version: doubled each time, and begun anew when the registry changes.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0


class LiveVersion:
    """One version in this process, from its loading to its end. Made by `LiveModels`."""

    def __init__(self, key: ModelKey) -> None:
        self.key = key
        self.state = ModelState.LOADING
        # Why it could not be loaded, for a version that was tried.
        self.fault: Exception | None = None
        self.task: asyncio.Task[Any] | None = None
        self.settled = asyncio.Event()
        self.leaves = asyncio.Event()
        self.ended = asyncio.Event()
        self.attempts = 1
        self.tried_s = time.monotonic()

    @property
    def problem(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.fault is None:
            return ""
        known = isinstance(self.fault, SetupError)
        return str(self.fault) if known else f"it could not be loaded ({type(self.fault).__name__}); see the log"

    @property
    def is_due(self) -> bool:
        """Whether a version that could not be loaded shall be tried again."""
        pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.attempts - 1, 10))
        return self.ended.is_set() and time.monotonic() >= self.tried_s + pause_s


class LiveModels:
    """Keeps tables of served models as the repository declares them. Made by `running_live_models`."""

    def __init__(
        self,
        repository: LiveRepository,
        tables: Sequence[ServedModels[Any]],
        meters: Meters,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.repository = repository
        self.versions: dict[ModelKey, LiveVersion] = {}
        # Whether this process's own routes lead to a version.
        self.is_routed: Callable[[ModelKey], bool] = lambda key: False
        self._tables = tables
        self._meters = meters
        self._start = start
        self._watchers: list[Callable[[], None]] = []
        # Loading takes cores and memory, and warming up measures times.
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._is_ending = False
        for table in tables:
            table.watch(self._wake.set)
            table.needs_changed = self._wake.set

    @property
    def keys(self) -> frozenset[ModelKey]:
        """The versions that this process has, or is loading or unloading."""
        return frozenset(key for key, version in self.versions.items() if not version.ended.is_set())

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls `changed` when the registry or the state of a version has changed."""
        self._watchers.append(changed)

    async def load_all(self) -> None:
        """Loads what is declared now. Raises the error of the first version that cannot be loaded, if there is no
        registry; with one, the others are served.
        """
        self.update()
        for version in list(self.versions.values()):
            await version.settled.wait()
            if version.fault and not self.repository.registry.revision:
                raise version.fault

    async def follow(self) -> None:
        """Follows the registry until it is cancelled."""
        while True:
            before = self.repository.registry
            await asyncio.to_thread(self.repository.look)
            if self.repository.registry is not before:
                for version in self.versions.values():
                    version.attempts, version.tried_s = 1, 0.0
                self._tell()
            self.update()
            self._wake.clear()
            with suppress(TimeoutError):
                # Not wait_for, which in Python 3.11 swallows a cancellation that comes together with the event.
                async with asyncio.timeout(self.repository.look_every_s):
                    await self._wake.wait()

    def update(self) -> None:
        """Starts to load what is missing, and lets go what may leave."""
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
        """Lets go everything, the last one first, and waits until it is unloaded."""
        self._is_ending = True
        self.repository.end()
        for version in reversed(list(self.versions.values())):
            version.leaves.set()
            if version.task and version.state is ModelState.LOADING:
                version.task.cancel()
        for version in list(self.versions.values()):
            if version.task:  # else it has opened nothing
                await version.ended.wait()

    def _may_leave(self, key: ModelKey, desired: frozenset[ModelKey]) -> bool:
        if key in desired or self.is_routed(key) or any(table.is_needed(key) for table in self._tables):
            return False
        if self.repository.registry.approval_of(key) != "approved":
            return True
        return all(self.versions[one].state is ModelState.READY for one in desired if one.name == key.name)

    def _begin(self, key: ModelKey, before: LiveVersion | None) -> None:
        version = self.versions[key] = LiveVersion(key)
        if before and before.fault:
            version.attempts = before.attempts + 1
        for state in ModelState:
            self._meters.gauge(
                Metrics.VERSION_STATE,
                lambda state=state: float(self.versions[key].state is state),  # type: ignore[misc]
                key.name,
                str(key.version),
                state.value,
            )
        self._meters.gauge(Metrics.VERSION_FETCHED, lambda: self._share_here(version), key.name, str(key.version))
        self._start(self._live(version, before.problem if before else ""))
        self._tell()

    def _share_here(self, version: LiveVersion) -> float:
        is_fetched = version.state in (ModelState.READY, ModelState.DRAINING)
        return self.repository.fetched.get(version.key, float(is_fetched))

    def _remove(self, key: ModelKey) -> None:
        for state in ModelState:
            self._meters.remove(Metrics.VERSION_STATE, key.name, str(key.version), state.value)
        self._meters.remove(Metrics.VERSION_FETCHED, key.name, str(key.version))
        del self.versions[key]
        self._tell()

    async def _live(self, version: LiveVersion, former_problem: str) -> None:
        """The life of a version. One task opens and closes it, so that what crashes in it ends this task."""
        version.task = asyncio.current_task()
        try:
            async with AsyncExitStack() as opened:  # closes the others even if closing one fails
                async with self._turn:
                    try:
                        await self._load(version, opened)
                    except Exception as fault:
                        version.fault, version.tried_s = fault, time.monotonic()
                        self._tell_failure(version, former_problem)
                self._tell()
                if not version.fault:
                    await version.leaves.wait()
                    version.state = ModelState.DRAINING
                    self._tell()
        finally:
            if not version.fault:
                gc.unfreeze()  # what it was made of is garbage now (platform/process/life.py)
            version.state = ModelState.FAILED if version.fault else ModelState.CLOSED
            version.settled.set()
            version.ended.set()
            self._tell()
            self._wake.set()

    async def _load(self, version: LiveVersion, opened: AsyncExitStack) -> None:
        key = version.key
        opened.callback(self.repository.release, key)
        bundle = await asyncio.to_thread(self.repository.take, key)
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
        event = "a version cannot be loaded; what was served stays"
        if isinstance(fault, SetupError):
            log_warning(event, model=key.name, version=key.version, problem=version.problem)
        elif fault:
            log_fault(event, fault, model=key.name, version=key.version)

    def _tell(self) -> None:
        problems = {key: version.problem for key, version in self.versions.items() if version.problem}
        for table in self._tables:
            table.tell_problems(problems)
        for changed in self._watchers:
            changed()


@asynccontextmanager
async def running_live_models(
    repository: LiveRepository, tables: Sequence[ServedModels[Any]], meters: Meters
) -> AsyncIterator[LiveModels]:
    """The tables of a process, in the order in which a version is opened in them, with all that is declared. After the
    block all is closed.

    Raises what loading raises where there is no registry, and what crashes in a version.
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
