"""bundles/live.py: a process brings itself to what the registry declares, and nothing that is wrong ends it."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from neuronpipe.bundles import live
from neuronpipe.bundles.folder_repository import FolderRepository, FolderSource
from neuronpipe.bundles.live import LiveModels, running_live_models
from neuronpipe.bundles.registry import REGISTRY_FILE, Registry, Signed
from neuronpipe.bundles.repository import Bundle, read_bundle, read_trusted_keys
from neuronpipe.bundles.served import ModelState, ServedModels
from neuronpipe.bundles.signing import SigningKey, create_key
from neuronpipe.bundles.writing import sign_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.streams import ModelNeeds
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle

_SIGNED = Signed("ann")
_LOOK_EVERY_S = 0.02
_M1, _M2 = ModelKey("m", 1), ModelKey("m", 2)


class _Loader:
    """Keeps account of what is loaded, and fails where it is told to."""

    def __init__(self) -> None:
        self.loaded: list[ModelKey] = []
        self.failing: set[ModelKey] = set()

    @asynccontextmanager
    async def open(self, bundle: Bundle) -> AsyncIterator[ModelKey]:
        key = ModelKey(*bundle.key)
        await asyncio.sleep(0)
        if key in self.failing:
            raise SetupError(f"{key} is broken")
        self.loaded.append(key)
        try:
            yield key
        finally:
            self.loaded.remove(key)


class _Process:
    """A process with two tables, such as a stage and a gateway."""

    def __init__(self, repository: Path) -> None:
        self.folder = repository
        self.loader = _Loader()
        self.tables = [ServedModels(self.loader.open) for _ in range(2)]
        self.meters = Meters()
        self.live: LiveModels

    @asynccontextmanager
    async def running(self, trusted_keys: Path | None = None) -> AsyncIterator["_Process"]:
        repository = FolderSource(self.folder, read_trusted_keys(trusted_keys))
        repository.look_every_s = _LOOK_EVERY_S
        async with running_live_models(repository, self.tables, self.meters) as self.live:
            yield self

    @property
    def served(self) -> list[frozenset[ModelKey]]:
        return [table.keys for table in self.tables]

    async def serves(self, *keys: ModelKey) -> None:
        await happens(lambda: self.served == [frozenset(keys)] * 2)

    def change(self, operation: Callable[[Registry], Registry]) -> None:
        FolderRepository(self.folder).change_registry(operation, _SIGNED)


@pytest.fixture
def process(tmp_path: Path) -> _Process:
    """Over a repository with two versions, of which the first is served."""
    for version in (1, 2):
        write_bundle(tmp_path, "m", version)
    process = _Process(tmp_path)
    process.change(lambda registry: registry.alias("m", "stable", 1, _SIGNED))
    return process


async def test_without_a_registry_every_version_is_served(process: _Process) -> None:
    (process.folder / REGISTRY_FILE).unlink()
    async with process.running():
        assert process.served == [{_M1, _M2}, {_M1, _M2}]
    assert process.loader.loaded == []


async def test_without_a_registry_a_version_that_cannot_be_loaded_ends_the_start(process: _Process) -> None:
    (process.folder / REGISTRY_FILE).unlink()
    process.loader.failing = {_M2}
    with pytest.raises(SetupError, match="is broken"):
        async with process.running():
            pass
    assert process.loader.loaded == []


async def test_a_new_stable_version_takes_the_place_of_the_old_one(process: _Process) -> None:
    async with process.running():
        await process.serves(_M1)
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await process.serves(_M2)
        assert process.loader.loaded == [_M2, _M2]
    assert process.loader.loaded == []


async def test_the_old_version_is_loaded_until_the_new_one_is(process: _Process) -> None:
    async with process.running():
        seen: list[frozenset[ModelKey]] = []
        process.tables[0].changes.watch(lambda: seen.append(process.tables[0].keys))
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await process.serves(_M2)
        assert [keys for keys in seen if not keys] == []


@pytest.mark.parametrize(
    ("needed", "then"),
    [(frozenset({_M1}), lambda needs, gateway: needs.set(gateway, frozenset({_M2}))), (None, ModelNeeds.forget)],
    ids=["by its word", "before it says anything, until it has gone"],
)
async def test_a_version_that_a_gateway_needs_is_not_unloaded(
    process: _Process, needed: frozenset[ModelKey] | None, then: Callable[[ModelNeeds, object], None]
) -> None:
    async with process.running():
        gateway, needs = object(), process.tables[0].needs
        needs.set(gateway, needed)
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await process.serves(_M1, _M2)
        await asyncio.sleep(3 * _LOOK_EVERY_S)  # nothing more happens
        assert process.served == [{_M1, _M2}] * 2
        then(needs, gateway)
        await process.serves(_M2)


async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_and_is_tried_again(process: _Process) -> None:
    async with process.running():
        process.loader.failing = {_M2}
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await happens(lambda: process.tables[0].problem_of(_M2) != "")
        assert process.live.versions[_M2].state is ModelState.FAILED
        assert process.meters.counter(Metrics.VERSION_LOADS, "m", "2", "failed").value == 1
        assert process.served == [{_M1}, {_M1}]
        process.loader.failing = set()
        process.change(lambda registry: registry.alias("m", "canary", 2, _SIGNED))  # so that it need not wait
        await process.serves(_M2)
        assert process.tables[0].problem_of(_M2) == ""


async def test_a_version_that_fails_in_the_second_table_leaves_the_first(process: _Process) -> None:
    async with process.running():
        process.tables[1]._open_model = lambda bundle: _broken()
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await happens(lambda: process.tables[0].problem_of(_M2) != "")
        assert process.tables[0].problem_of(_M2) == "it could not be loaded (ZeroDivisionError); see the log"
        assert process.loader.loaded == [_M1, _M1]


@asynccontextmanager
async def _broken() -> AsyncIterator[ModelKey]:
    yield ModelKey("m", 1 // 0)


async def test_at_the_start_a_version_that_cannot_be_loaded_leaves_the_others_served(process: _Process) -> None:
    process.change(lambda registry: registry.alias("m", "canary", 2, _SIGNED))
    process.loader.failing = {_M2}
    async with process.running():
        assert process.served == [{_M1}, {_M1}]


async def test_a_rejected_version_leaves_though_its_successor_cannot_be_loaded(process: _Process) -> None:
    rejected = read_bundle(process.folder / "m" / "1")
    async with process.running():
        process.loader.failing = {_M2}
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED).reject(rejected, _SIGNED))
        await process.serves()


@pytest.mark.parametrize("damage", ["vanished", "half-written", "empty", "a folder"])
async def test_a_registry_that_cannot_be_read_changes_nothing(process: _Process, damage: str) -> None:
    path = process.folder / REGISTRY_FILE
    async with process.running():
        written = path.read_bytes()
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        elif damage != "vanished":
            path.write_bytes(written[:100] if damage == "half-written" else b"")
        await happens(lambda: process.live.repository.problem != "")
        assert process.served == [{_M1}, {_M1}]
        if path.is_dir():
            path.rmdir()
        path.write_bytes(written)
        await happens(lambda: process.live.repository.problem == "")
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await process.serves(_M2)


async def test_a_registry_that_comes_later_is_followed(process: _Process) -> None:
    written = (process.folder / REGISTRY_FILE).read_bytes()
    (process.folder / REGISTRY_FILE).unlink()
    async with process.running():
        assert process.served == [{_M1, _M2}] * 2
        (process.folder / REGISTRY_FILE).write_bytes(written)
        await process.serves(_M1)


async def test_a_bundle_that_is_not_the_one_approved_is_not_loaded(process: _Process) -> None:
    process.change(lambda registry: registry.alias("m", "canary", 2, _SIGNED))
    shutil.rmtree(process.folder / "m" / "2")
    write_bundle(process.folder, "m", 2, cache_results=True)
    async with process.running():
        assert "it is not the bundle that was approved" in process.tables[0].problem_of(_M2)


async def test_trusted_keys_hold_for_versions_that_come_later(process: _Process, tmp_path: Path) -> None:
    keys = tmp_path / ".keys"
    keys.mkdir()
    create_key(keys / "key", keys / "public")
    sign_bundle(process.folder / "m" / "1", SigningKey.read(keys / "key", "--key"))
    async with process.running(keys / "public"):
        assert process.served == [{_M1}, {_M1}]
        process.change(lambda registry: registry.alias("m", "canary", 2, _SIGNED))
        await happens(lambda: "is not signed" in process.tables[0].problem_of(_M2))
        assert process.served == [{_M1}, {_M1}]


async def test_a_version_that_comes_back_while_it_is_unloaded_is_loaded_again(process: _Process) -> None:
    async with process.running():
        with process.tables[0].table.find("m", "1"):
            process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
            await happens(lambda: process.live.versions[_M1].state is ModelState.DRAINING)
            process.change(lambda registry: registry.alias("m", "stable", 1, _SIGNED))
            await asyncio.sleep(3 * _LOOK_EVERY_S)  # it cannot be loaded twice
            assert _M2 in process.tables[1].keys
        await process.serves(_M1)


async def test_what_crashes_in_a_version_ends_the_process(process: _Process) -> None:
    crashes = asyncio.Event()

    @asynccontextmanager
    async def open_model(bundle: Bundle) -> AsyncIterator[ModelKey]:
        async with asyncio.TaskGroup() as group:

            async def crash() -> None:
                await crashes.wait()
                raise ZeroDivisionError

            group.create_task(crash())
            yield ModelKey(*bundle.key)

    process.tables[0]._open_model = open_model

    async def run() -> None:
        async with process.running(), asyncio.timeout(10):
            crashes.set()
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await run()
    assert process.loader.loaded == []


async def test_a_version_whose_files_are_fetched_for_long_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        write_bundle(tmp_path, "m", version)
    process = _Process(tmp_path)
    process.change(lambda registry: registry.alias("m", "stable", 1, _SIGNED))
    take, go_on = FolderSource.take, threading.Event()

    def take_late(source: FolderSource, key: ModelKey) -> Bundle:
        if key == _M2:
            go_on.wait(60)
        return take(source, key)

    monkeypatch.setattr(FolderSource, "take", take_late)
    monkeypatch.setattr(live, "_PATIENCE_S", 0.05)
    async with process.running():
        process.change(lambda registry: registry.alias("m", "stable", 2, _SIGNED))
        await happens(lambda: _M2 in process.live.versions)
        process.change(lambda registry: registry.alias("m", "next", 3, _SIGNED))
        await process.serves(_M1, ModelKey("m", 3))
        go_on.set()
        await process.serves(_M2, ModelKey("m", 3))
