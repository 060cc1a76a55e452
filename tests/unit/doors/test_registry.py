"""doors/registry.py: each change that a caller may ask for, and what is refused without a change."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.api.v1.registry_pb2 import (
    ChangeRegistryRequest,
    GetRegistryRequest,
    RouteShare,
    Routing,
    SetAlias,
    Shadow,
)
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.core.errors import ChangeRefused, InvalidInput, ModelNotFound, NeuronpipeError
from neuronpipe.doors.registry import RegistryDoor
from tests.unit.bundles.written import write_bundle

_NO_CONTEXT: Any = None


@pytest.fixture
async def door(tmp_path: Path) -> RegistryDoor:
    """Of a repository with the versions 1, 2 and 3 of the model m; version 1 is stable, the others are pending."""
    door = RegistryDoor(FolderRepository(tmp_path), None, None)
    write_bundle(tmp_path, "m", 1)
    await _change(door, approve=1)  # what is there when a registry begins is approved
    for version in (2, 3):
        write_bundle(tmp_path, "m", version)
    return door


async def _change(door: RegistryDoor, **change: Any) -> Any:
    """What the registry says of the model afterwards."""
    answer = await door.change_registry(ChangeRegistryRequest(model="m", **change), _NO_CONTEXT)
    return json.loads(answer.registry_json)["models"]["m"]


async def _registry(door: RegistryDoor, model: str = "") -> Any:
    return json.loads((await door.get_registry(GetRegistryRequest(model=model), _NO_CONTEXT)).registry_json)


async def test_every_kind_of_change_is_made(door: RegistryDoor) -> None:
    assert (await _change(door, approve=2))["aliases"] == {"stable": 1}
    assert (await _change(door, alias=SetAlias(alias="next", version=2)))["aliases"] == {"stable": 1, "next": 2}
    assert (await _change(door, alias=SetAlias(alias="next")))["aliases"] == {"stable": 1}
    assert (await _change(door, alias=SetAlias(alias="stable", version=2)))["aliases"] == {"stable": 2}
    revision = (await _registry(door))["revision"]
    assert (await _change(door, roll_back=0))["aliases"] == {"stable": 1}
    await _change(door, alias=SetAlias(alias="next", version=1))
    assert (await _change(door, roll_back=revision))["aliases"] == {"stable": 2}
    assert (await _change(door, reject=1))["versions"]["1"]["approval"]["state"] == "rejected"
    routing = Routing(aliases=[SetAlias(alias="stable", version=2)], route=[RouteShare(target="2", share=1)])
    assert (await _change(door, routing=routing))["route"] == {"2": 1}


async def test_a_change_of_another_revision_than_that_of_now_is_refused(door: RegistryDoor) -> None:
    await _change(door, alias=SetAlias(alias="next", version=1), if_revision=(await _registry(door))["revision"])
    before = await _registry(door)
    with pytest.raises(ChangeRefused, match=f"has the revision {before['revision']}, not {before['revision'] + 1}"):
        await _change(door, approve=2, if_revision=before["revision"] + 1)
    assert await _registry(door) == before


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({}, InvalidInput, "change: is missing"),
        ({"approve": 2, "note": "a" * 1001}, InvalidInput, "note: has 1001 characters, the limit is 1000"),
        (
            {"routing": Routing(route=[RouteShare(target="1", share=1), RouteShare(target="1", share=2)])},
            InvalidInput,
            "routing.route: names a target twice",
        ),
        (
            {"routing": Routing(aliases=[SetAlias(alias="a", version=1), SetAlias(alias="a", version=1)])},
            InvalidInput,
            "routing.aliases: names an alias twice",
        ),
        (
            {"routing": Routing(shadow=Shadow(target="1", percent=math.nan))},
            ChangeRefused,
            "shadow.percent: Input should be",
        ),
        (
            {"routing": Routing(route=[RouteShare(target="1".zfill(65), share=1)])},
            ChangeRefused,
            "should have at most 64 characters",
        ),
        (
            {"routing": Routing(route=[RouteShare(target=f"{number:03}", share=1) for number in range(101)])},
            ChangeRefused,
            "route: Dictionary should have at most 100 items",
        ),
        (
            {"routing": Routing(aliases=[SetAlias(alias=f"a{number}", version=1) for number in range(101)])},
            ChangeRefused,
            "aliases: Dictionary should have at most 100 items",
        ),
        ({"approve": 2, "note": "\x1b[31m"}, InvalidInput, "note: has characters that cannot be printed"),
        ({"alias": SetAlias(alias="next", version=3)}, ChangeRefused, "is not registered"),
        ({"alias": SetAlias(alias="next")}, ChangeRefused, "model 'm' has no alias 'next'"),
    ],
)
async def test_what_is_no_change_is_refused(
    door: RegistryDoor, change: dict[str, Any], error: type[NeuronpipeError], problem: str
) -> None:
    before = await _registry(door)
    with pytest.raises(error) as caught:
        await _change(door, **change)
    assert problem in caught.value.message
    assert await _registry(door) == before


async def test_a_model_that_is_not_registered_is_not_found(door: RegistryDoor) -> None:
    with pytest.raises(ModelNotFound, match="model 'other' is not registered"):
        await _registry(door, "other")


async def test_a_name_that_no_file_can_have_is_refused(door: RegistryDoor) -> None:
    with pytest.raises(ChangeRefused, match="cannot be read: File name too long"):
        await door.change_registry(ChangeRegistryRequest(model="m" * 300, approve=1), _NO_CONTEXT)
