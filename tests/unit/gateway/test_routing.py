"""gateway/routing.py: requests go to versions that every stage has, and to the former ones until then."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model, VersionState
from neuronpipe.bundles.folder_repository import FolderRepository, FolderSource
from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.manifest import Source
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.errors import ModelNotFound, SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.streams import Preparation
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.routing import VersionRouter, open_gateway_models
from tests.servers.door import bundle_of
from tests.suite.waiting import cancelled, happens
from tests.unit.bundles.written import write_bundle
from tests.unit.gateway.coalescer import System
from tests.unit.model_specs import model_spec

_SIGNED = Signed("ann")
_M1, _M2 = ModelKey("m", 1), ModelKey("m", 2)


class _Gateway:
    """A gateway with one stage inside and one outside."""

    def __init__(self, folder: Path, system: System) -> None:
        self.folder = folder
        self.system = system
        self.models = open_gateway_models(Meters(), lambda bundle: False)
        self.failing: set[ModelKey] = set()
        self.near = ServedModels(self._open)

    @asynccontextmanager
    async def _open(self, bundle: Bundle) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        if ModelKey(*bundle.key) in self.failing:
            raise SetupError("it is broken")
        yield "loaded"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["_Gateway"]:
        repository = FolderSource(self.folder)
        repository.look_every_s = 0.02
        tables: list[ServedModels[Any]] = [self.near, self.models]
        async with running_live_models(repository, tables, Meters()) as live:
            router = VersionRouter(live, self.models, [self.near], {"tokenizer": self.system.coalescer})
            self.catalog = Catalog(self.models, router=router)
            yield self

    def make_stable(self, version: int) -> None:
        self.change(lambda registry: registry.alias("m", "stable", version, _SIGNED))

    def change(self, operation: Callable[[Registry], Registry]) -> None:
        FolderRepository(self.folder).change_registry(operation, _SIGNED)

    def answers(self, version: str = "", key: str = "") -> int:
        """The version that answers a request."""
        return self.catalog.models.table.find("m", version, key).spec.version

    def state(self, version: int) -> tuple["VersionState.ValueType", str]:
        listed = {model.version: model for model in self.catalog.list_models().models}
        found = listed.get(str(version), Model())
        return found.state, found.problem


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[_Gateway]:
    """Version 1 is stable, and the far stage has it."""
    for version in (1, 2):
        write_bundle(tmp_path, "m", version)
    system = System()
    made = _Gateway(tmp_path, system)
    made.make_stable(1)
    try:
        async with made.running():
            yield made
    finally:
        await cancelled(*system.tasks)


async def test_a_version_gets_requests_when_the_last_stage_has_it(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.make_stable(2)
    await happens(lambda: _M2 in gateway.catalog.models.keys)
    assert [gateway.answers(version) for version in ("", "stable", "2")] == [1, 1, 2]
    assert gateway.state(2) == (VersionState.VERSION_STATE_LOADING, "")
    await wire.announce(_M1, _M2)
    assert [gateway.answers(version) for version in ("", "stable")] == [2, 2]
    assert gateway.state(2) == (VersionState.VERSION_STATE_READY, "")


async def test_the_former_version_is_let_go_when_requests_have_moved_and_stages_are_told(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.make_stable(2)
    await happens(lambda: bool(wire.needed) and wire.needed[-1] == {_M1, _M2})
    await asyncio.sleep(0.1)  # nothing more happens
    assert wire.needed[-1] == {_M1, _M2}
    with gateway.catalog.models.table.find("m", "1"):  # a request is still running
        await wire.announce(_M1, _M2)
        await happens(lambda: gateway.state(1)[0] == VersionState.VERSION_STATE_DRAINING)
        assert wire.needed[-1] == {_M1, _M2}
    await happens(lambda: wire.needed[-1] == {_M2})
    assert gateway.catalog.models.keys == gateway.near.keys == {_M2}


async def test_a_version_says_how_far_all_processes_together_have_prepared_it(gateway: _Gateway) -> None:
    for ready in 40, 10:
        wire = await gateway.system.connect(_M1)
        await wire.prepares({_M1: Preparation(138, ready, 3, 1000)})
    gateway.near.tell(prepared={_M1: Preparation(1, 1, 0, 0)})
    [model] = gateway.catalog.list_models().models
    assert (model.shapes, model.shapes_ready, model.lone_graphs, model.lone_graph_bytes) == (277, 51, 6, 2000)


async def test_what_a_far_stage_cannot_load_is_told_and_changes_no_route(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.make_stable(2)
    await happens(lambda: _M2 in gateway.catalog.models.keys)
    await wire.fail_to_load(_M2, "no room", _M1)
    assert gateway.state(2) == (VersionState.VERSION_STATE_FAILED, "tokenizer: no room")
    assert gateway.answers() == 1
    other = await gateway.system.connect(_M2)
    assert gateway.state(2) == (VersionState.VERSION_STATE_READY, "tokenizer: no room")
    assert gateway.answers() == 2
    await happens(lambda: other.needed[-1] == {_M2})


async def test_a_far_stage_with_another_bundle_of_a_version_does_not_have_the_version(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.make_stable(2)
    await happens(lambda: _M2 in gateway.catalog.models.keys)
    digests = dict(gateway.catalog.models.digests)
    await wire.announce_bundles({**digests, _M2: "b" * 64})
    state, problem = gateway.state(2)
    assert state == VersionState.VERSION_STATE_FAILED
    assert problem.startswith("tokenizer: ipv4:10.0.0.7:50051 has another bundle of this version")
    assert gateway.answers() == 1
    await wire.announce_bundles(digests)
    assert gateway.state(2) == (VersionState.VERSION_STATE_READY, "")
    assert gateway.answers() == 2


async def test_the_last_items_of_a_version_that_drains_go_to_no_other_bundle(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.make_stable(2)
    await happens(lambda: _M2 in gateway.catalog.models.keys)
    with gateway.catalog.models.table.find("m", "1"):  # a request is still running
        await wire.announce(_M1, _M2)
        await happens(lambda: gateway.state(1)[0] == VersionState.VERSION_STATE_DRAINING)
        await wire.announce_bundles({_M1: "b" * 64, _M2: gateway.catalog.models.digests[_M2]})
        assert not gateway.system.coalescer.has(_M1)
    await happens(lambda: _M1 not in gateway.system.coalescer.digests)


async def test_what_a_near_stage_cannot_load_is_told_and_changes_no_route(gateway: _Gateway) -> None:
    await gateway.system.connect(_M1, _M2)
    gateway.failing = {_M2}
    gateway.make_stable(2)
    await happens(lambda: gateway.state(2) == (VersionState.VERSION_STATE_FAILED, "it is broken"))
    assert gateway.answers() == 1


async def test_an_unloaded_model_gets_no_requests_and_is_let_go_until_it_is_loaded(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    gateway.change(lambda registry: registry.unload("m", _SIGNED))
    await happens(lambda: not gateway.catalog.models.keys)
    with pytest.raises(ModelNotFound):
        gateway.answers()
    assert gateway.catalog.unloaded == [_M1, _M2]
    await happens(lambda: wire.needed[-1] == frozenset())
    assert gateway.near.keys == frozenset()
    gateway.change(lambda registry: registry.load("m", _SIGNED))
    await happens(lambda: gateway.catalog.models.keys == {_M1})
    assert (gateway.answers(), gateway.answers("stable"), gateway.catalog.unloaded) == (1, 1, [])


async def test_the_share_of_a_version_that_goes_is_anothers(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1, _M2)
    gateway.change(
        lambda registry: registry.alias("m", "canary", 2, _SIGNED).reroute("m", {"stable": 1, "canary": 1}, _SIGNED)
    )
    keys = [f"user-{number}" for number in range(100)]
    await happens(lambda: {gateway.answers("", key) for key in keys} == {1, 2})
    described = gateway.catalog.get_model(GetModelRequest(name="m", version="canary")).model
    assert (described.version, described.share, list(described.aliases)) == ("2", 0.5, ["canary"])
    await wire.announce(_M1)
    assert {gateway.answers("", key) for key in keys} == {1}
    await wire.announce(_M1, _M2)
    assert {gateway.answers("", key) for key in keys} == {1, 2}


async def test_a_stage_that_goes_altogether_leaves_the_routes_as_declared(gateway: _Gateway) -> None:
    wire = await gateway.system.connect(_M1)
    await wire.die()
    assert gateway.answers() == 1
    assert gateway.state(1) == (VersionState.VERSION_STATE_LOADING, "")


@pytest.mark.parametrize("count", [1, 3])
async def test_every_endpoint_learns_what_is_needed_also_one_that_comes_later(gateway: _Gateway, count: int) -> None:
    wires = [await gateway.system.connect(_M1) for _ in range(count)]
    assert [wire.needed for wire in wires] == [[{_M1}]] * count


async def test_a_model_from_the_hub_has_its_name_there_where_no_other_was_compiled_from_it() -> None:
    models = open_gateway_models(Meters(), lambda bundle: False, {"mine": "c"})
    for name, location, revision in (
        ("a", "BAAI/bge-m3", "f1"),
        ("b", "org/base", "f1"),
        ("c", "org/base", "f1"),
        ("d", "/a/folder", None),
    ):
        bundle = bundle_of(model_spec(name=name))
        source = Source(location=location, revision=revision, weights_sha256="")
        await models.open(replace(bundle, manifest=bundle.manifest.model_copy(update={"source": source})))
    assert models.table.other_names == {"BAAI/bge-m3": "a", "mine": "c"}
    assert models.table.find("BAAI/bge-m3", "").key == ModelKey("a", 1)
