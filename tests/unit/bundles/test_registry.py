"""bundles/registry.py and sources.py: what is declared, who declared it, and writers that do not lose changes."""

import json
import multiprocessing
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import REGISTRY_FILE, Registry, Signed
from neuronpipe.bundles.repository import Bundle, read_bundle, read_repository
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from tests.unit.bundles.written import write_bundle

_SIGNED = Signed("ann", "", datetime(2026, 11, 22, 12, tzinfo=UTC))


@pytest.fixture
def bundles(tmp_path: Path) -> list[Bundle]:
    """Versions 1, 2 and 3 of the model m."""
    return [read_bundle(write_bundle(tmp_path, "m", version)) for version in (1, 2, 3)]


@pytest.fixture
def registry(bundles: list[Bundle]) -> Registry:
    """Version 1 is stable, 2 is approved, and nobody has looked at 3."""
    return Registry().approve(bundles[0], _SIGNED).approve(bundles[1], _SIGNED)


def test_a_models_first_approved_version_becomes_stable_and_the_next_does_not(registry: Registry) -> None:
    assert registry.models["m"].aliases == {"stable": 1}
    assert registry.models["m"].approved == {1, 2}
    assert set(registry.desired) == {ModelKey("m", 1)}
    assert registry.approval_of(ModelKey("m", 3)) == "pending"


def test_versions_with_an_alias_or_a_share_are_desired(registry: Registry) -> None:
    named = registry.alias("m", "canary", 2, _SIGNED)
    assert set(named.desired) == {ModelKey("m", 1), ModelKey("m", 2)}
    shared = registry.reroute("m", {"stable": 95, "2": 5}, _SIGNED)
    assert set(shared.desired) == {ModelKey("m", 1), ModelKey("m", 2)}
    assert shared.models["m"].declared.shares == ((1, 95.0), (2, 5.0))


def test_two_targets_of_one_version_are_one_share(registry: Registry) -> None:
    shared = registry.alias("m", "canary", 1, _SIGNED).reroute("m", {"stable": 90, "canary": 10}, _SIGNED)
    assert shared.models["m"].declared.shares == ((1, 100.0),)


def test_a_shadow_is_desired_and_gets_no_share(registry: Registry) -> None:
    shadowed = registry.copy_to("m", "2", 10, _SIGNED)
    assert set(shadowed.desired) == {ModelKey("m", 1), ModelKey("m", 2)}
    assert (shadowed.models["m"].declared.shares, shadowed.models["m"].declared.shadow) == (((1, 1.0),), (2, 0.1))
    assert shadowed.history[-1].action == "shadow 2=10"
    assert shadowed.copy_to("m", "", 0, _SIGNED).models["m"].shadow is None
    assert shadowed.roll_back("m", None, _SIGNED).models["m"].shadow is None


def test_a_rejected_shadow_gets_no_more_copies(registry: Registry, bundles: list[Bundle]) -> None:
    shadowed = registry.alias("m", "next", 2, _SIGNED).copy_to("m", "next", 10, _SIGNED)
    assert shadowed.reject(bundles[1], _SIGNED).models["m"].shadow is None


def test_a_shadow_must_be_approved_and_its_percentage_make_sense(registry: Registry) -> None:
    with pytest.raises(SetupError, match="3 is version 3, which is not registered; only approved versions"):
        registry.copy_to("m", "3", 10, _SIGNED)
    for percent in (0, 101, float("nan")):
        with pytest.raises(SetupError, match=r"model 'm': shadow\.percent: "):
            registry.copy_to("m", "2", percent, _SIGNED)
    with pytest.raises(SetupError, match="'next' is neither a version nor an alias"):
        registry.alias("m", "next", 2, _SIGNED).copy_to("m", "next", 10, _SIGNED).alias("m", "next", None, _SIGNED)


def test_an_unloaded_model_keeps_names_and_shares_until_it_is_loaded(registry: Registry, bundles: list[Bundle]) -> None:
    canary = registry.alias("m", "canary", 2, _SIGNED).reroute("m", {"stable": 1, "canary": 1}, _SIGNED)
    unloaded = canary.unload("m", _SIGNED)
    assert (dict(unloaded.desired), unloaded.routes) == ({}, {})
    assert unloaded.alias("m", "canary", 1, _SIGNED).models["m"].is_unloaded
    assert unloaded.reject(bundles[1], _SIGNED).models["m"].is_unloaded
    for loaded in unloaded.load("m", _SIGNED), unloaded.roll_back("m", None, _SIGNED):
        assert loaded.models["m"] == canary.models["m"]
    assert [change.action for change in unloaded.load("m", _SIGNED).history[-2:]] == ["unload", "load"]


def test_a_model_that_nobody_has_approved_is_not_loaded(bundles: list[Bundle]) -> None:
    with pytest.raises(SetupError, match="model 'm' has no approved version; `neuronpipe registry approve`"):
        Registry().register(bundles[0], _SIGNED).load("m", _SIGNED)
    with pytest.raises(SetupError, match="model 'm' is not registered"):
        Registry().unload("m", _SIGNED)


def test_a_version_that_is_not_approved_gets_no_alias_and_no_share(registry: Registry) -> None:
    with pytest.raises(SetupError, match="canary is version 3, which is not registered; only approved versions"):
        registry.alias("m", "canary", 3, _SIGNED)
    with pytest.raises(SetupError, match="'canary' is neither a version nor an alias of the model"):
        registry.reroute("m", {"stable": 9, "canary": 1}, _SIGNED)
    with pytest.raises(SetupError, match=r"route\.stable: Input should be greater than 0"):
        registry.reroute("m", {"stable": 0}, _SIGNED)
    with pytest.raises(SetupError, match="alias '2': must begin with a letter"):
        registry.alias("m", "2", 2, _SIGNED)
    with pytest.raises(SetupError, match="model 'n' is not registered; registered are: m"):
        registry.alias("n", "stable", 1, _SIGNED)


def test_a_rejected_version_loses_its_aliases_and_shares(registry: Registry, bundles: list[Bundle]) -> None:
    routed = registry.alias("m", "canary", 2, _SIGNED).reroute("m", {"stable": 95, "canary": 5}, _SIGNED)
    rejected = routed.reject(bundles[1], Signed("bob", "wrong labels", _SIGNED.time))
    model = rejected.models["m"]
    assert model.aliases == {"stable": 1}
    assert model.route == {"stable": 95}
    assert model.approved == {1}
    assert (model.versions[2].approval.author, model.versions[2].approval.note) == ("bob", "wrong labels")
    assert rejected.history[-1].action == "rejected version 2: wrong labels"


def test_a_rejected_version_loses_shares_in_another_writing(registry: Registry, bundles: list[Bundle]) -> None:
    routed = registry.reroute("m", {"stable": 95, "02": 5}, _SIGNED).copy_to("m", "002", 5, _SIGNED)
    model = routed.reject(bundles[1], _SIGNED).models["m"]
    assert (model.route, model.shadow) == ({"stable": 95}, None)


def test_the_stable_version_is_not_rejected(registry: Registry, bundles: list[Bundle]) -> None:
    with pytest.raises(SetupError, match="version 1 is stable: make another version stable first"):
        registry.reject(bundles[0], _SIGNED)


def test_a_version_does_not_change_its_content(registry: Registry, tmp_path: Path) -> None:
    changed = read_bundle(write_bundle(tmp_path / "other", "m", 1, cache_results=True))
    with pytest.raises(SetupError, match="versions do not change: compile another one"):
        registry.approve(changed, _SIGNED)


def test_a_rollback_restores_aliases_and_route_and_is_itself_in_the_history(registry: Registry) -> None:
    moved = registry.alias("m", "stable", 2, _SIGNED)
    back = moved.roll_back("m", None, _SIGNED)
    assert back.models["m"].aliases == {"stable": 1}
    expected = ["approved version 1", "approved version 2", "alias stable: 1 to 2", "rolled back to revision 2"]
    assert [change.action for change in back.history] == expected
    assert back.roll_back("m", 3, _SIGNED).models["m"].aliases == {"stable": 2}
    with pytest.raises(SetupError, match="the history of model 'm' does not have the revision 0 or an earlier one"):
        back.roll_back("m", 0, _SIGNED)
    with pytest.raises(SetupError, match="revision 5: the registry has the revision 4"):
        back.roll_back("m", 5, _SIGNED)


def test_a_rollback_to_a_version_that_was_rejected_is_refused(registry: Registry, bundles: list[Bundle]) -> None:
    moved = registry.alias("m", "stable", 2, _SIGNED).reject(bundles[0], _SIGNED)
    with pytest.raises(SetupError, match="stable is version 1, which is rejected"):
        moved.roll_back("m", 2, _SIGNED)


def test_the_first_change_writes_down_what_was_served_before(bundles: list[Bundle], tmp_path: Path) -> None:
    write_bundle(tmp_path, "n", 7)
    assert FolderRepository(tmp_path).read_registry().revision == 0
    changed = FolderRepository(tmp_path).change_registry(
        lambda present: present.alias("m", "canary", 2, _SIGNED), _SIGNED
    )
    assert changed == FolderRepository(tmp_path).read_registry()
    expected = {"m": {"stable": 3, "canary": 2}, "n": {"stable": 7}}
    assert {name: model.aliases for name, model in changed.models.items()} == expected
    assert read_repository(tmp_path)  # the file is in nobody's way


def test_a_version_that_was_just_compiled_was_not_served_before(bundles: list[Bundle], tmp_path: Path) -> None:
    def approve(present: Registry) -> Registry:
        return present.approve(bundles[2], _SIGNED)

    changed = FolderRepository(tmp_path).change_registry(approve, _SIGNED, new=("m", 3))
    assert changed.models["m"].aliases == {"stable": 2}
    assert changed.models["m"].approved == {1, 2, 3}


def test_a_change_that_is_refused_leaves_no_registry(bundles: list[Bundle], tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        FolderRepository(tmp_path).change_registry(lambda present: present.alias("m", "canary", 9, _SIGNED), _SIGNED)
    assert not (tmp_path / REGISTRY_FILE).exists()


def _name_twenty(repository: Path, letter: str) -> None:
    for number in range(20):
        FolderRepository(repository).change_registry(
            lambda now, n=number: now.alias("m", f"{letter}{n}", 1, _SIGNED),  # type: ignore[misc]
            _SIGNED,
        )


def test_no_change_of_two_writers_at_once_is_lost(bundles: list[Bundle], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_name_twenty, args=(tmp_path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    registry = FolderRepository(tmp_path).read_registry()
    wanted = {f"{letter}{number}" for letter in "ab" for number in range(20)} | {"stable"}
    assert registry.models["m"].aliases.keys() == wanted
    assert registry.revision == 41


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda written: written[: len(written) // 2], "not a valid registry: Invalid JSON"),
        (lambda written: b"", "not a valid registry: Invalid JSON"),
        (lambda written: written.replace(b'"schema_version": 1', b'"schema_version": 2'), "schema_version"),
        (
            lambda written: written.replace(b'"stable": 1', b'"stable": 9'),
            "stable is version 9, which is not registered",
        ),
    ],
)
def test_a_damaged_registry_is_refused_by_name(
    registry: Registry, tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    path = tmp_path / REGISTRY_FILE
    path.write_bytes(damage(registry.model_dump_json(indent=2).encode()))
    with pytest.raises(SetupError, match=said) as refused:
        FolderRepository(tmp_path).read_registry()
    assert str(refused.value).startswith(str(path))


def test_a_pipe_is_no_registry(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / REGISTRY_FILE)
    with pytest.raises(SetupError, match=f"^{tmp_path / REGISTRY_FILE}: is a pipe or a device; must be a file$"):
        FolderRepository(tmp_path).read_registry()


def test_what_is_written_is_what_is_read(registry: Registry, tmp_path: Path) -> None:
    assert Registry.parse(registry.model_dump_json().encode(), tmp_path) == registry
    assert json.loads(registry.model_dump_json())["models"]["m"]["aliases"] == {"stable": 1}
