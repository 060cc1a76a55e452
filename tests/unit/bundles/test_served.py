"""bundles/served.py: models are opened and closed one by one, and not while somebody uses them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ModelState, ServedModels, running_models
from neuronpipe.core.errors import ModelNotFound, SetupError, Unavailable
from neuronpipe.core.items import ModelKey
from tests.servers.door import bundle_of
from tests.unit.model_specs import model_spec


class _Loader:
    """Keeps account of what is loaded."""

    def __init__(self, failing: str = "") -> None:
        self.loaded: list[str] = []
        self._failing = failing

    @asynccontextmanager
    async def open(self, bundle: Bundle) -> AsyncIterator[str]:
        name = f"{bundle.spec.name}/{bundle.spec.version}"
        if name == self._failing:
            raise SetupError(f"{name} is broken")
        self.loaded.append(name)
        try:
            yield name
        finally:
            self.loaded.remove(name)


def _bundle(name: str = "a", version: int = 1) -> Bundle:
    return bundle_of(model_spec(name=name, version=version))


async def test_a_model_that_was_opened_is_found_by_name_and_version() -> None:
    models = ServedModels(_Loader().open)
    await models.open(_bundle("a", 1))
    await models.open(_bundle("a", 2))
    assert [models.table.find("a", version).resource for version in ("1", "2", "")] == ["a/1", "a/2", "a/2"]
    assert models.keys == {ModelKey("a", 1), ModelKey("a", 2)}


async def test_the_digests_of_bundles_are_announced() -> None:
    models = ServedModels(_Loader().open)
    await models.open(replace(_bundle("a"), digest="abc"))
    assert models.announced.digests == {ModelKey("a", 1): "abc"}


async def test_a_table_that_was_looked_at_does_not_change() -> None:
    models = ServedModels(_Loader().open)
    await models.open(_bundle("a"))
    before = models.table
    await models.open(_bundle("b"))
    await models.close(ModelKey("a", 1))
    assert [model.resource for model in before] == ["a/1"]
    with pytest.raises(ModelNotFound):
        models.table.find("a", "")


async def test_a_model_that_is_used_is_unloaded_when_the_last_use_ends() -> None:
    loader = _Loader()
    models = ServedModels(loader.open)
    await models.open(_bundle())
    served = models.table.find("a", "")
    with served, served:
        closing = asyncio.create_task(models.close(served.key))
        await asyncio.sleep(0.01)
        assert (loader.loaded, served.state, models.keys) == (["a/1"], ModelState.DRAINING, frozenset())
        with pytest.raises(Unavailable, match="model 'a' version 1 is draining"), served:
            pass
    await closing
    assert (loader.loaded, served.state) == ([], ModelState.CLOSED)


async def test_a_model_that_cannot_be_loaded_leaves_the_others_served() -> None:
    loader = _Loader(failing="b/1")
    models = ServedModels(loader.open)
    await models.open(_bundle("a"))
    with pytest.raises(SetupError, match="b/1 is broken"):
        await models.open(_bundle("b"))
    assert models.keys == {ModelKey("a", 1)}
    assert loader.loaded == ["a/1"]


async def test_a_model_that_is_served_is_not_opened_twice() -> None:
    models = ServedModels(_Loader().open)
    await models.open(_bundle())
    with pytest.raises(SetupError, match="model 'a' version 1 is served already"):
        await models.open(_bundle())


async def test_a_model_that_is_being_opened_is_not_opened_twice() -> None:
    loader = _Loader()

    @asynccontextmanager
    async def open_model(bundle: Bundle) -> AsyncIterator[str]:
        await asyncio.sleep(0)  # another may begin meanwhile
        async with loader.open(bundle) as name:
            yield name

    models = ServedModels(open_model)
    results = await asyncio.gather(models.open(_bundle()), models.open(_bundle()), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), SetupError]
    assert loader.loaded == ["a/1"]
    await models.close(ModelKey("a", 1))
    await models.open(_bundle())


async def test_a_model_that_cannot_be_unloaded_leaves_no_other_loaded() -> None:
    loader = _Loader()

    @asynccontextmanager
    async def open_model(bundle: Bundle) -> AsyncIterator[str]:
        async with loader.open(bundle) as name:
            yield name
            if name == "b/1":
                raise OSError("the device does not answer")

    with pytest.raises(OSError, match="the device does not answer"):
        async with running_models(ServedModels(open_model), [_bundle("a"), _bundle("b"), _bundle("c")]):
            pass
    assert loader.loaded == []


async def test_whoever_watches_learns_of_every_change() -> None:
    models = ServedModels(_Loader().open)
    seen: list[int] = []
    stop = models.changes.watch(lambda: seen.append(len(models.keys)))
    await models.open(_bundle("a"))
    await models.open(_bundle("b"))
    await models.close(ModelKey("a", 1))
    stop()
    await models.close(ModelKey("b", 1))
    assert seen == [1, 2, 1]


async def test_all_models_are_closed_with_the_block_also_where_one_cannot_be_opened() -> None:
    loader = _Loader(failing="c/1")
    async with running_models(ServedModels(loader.open), [_bundle("a"), _bundle("b")]):
        assert loader.loaded == ["a/1", "b/1"]
    assert loader.loaded == []
    with pytest.raises(SetupError):
        async with running_models(ServedModels(loader.open), [_bundle("a"), _bundle("c")]):
            pass
    assert loader.loaded == []
