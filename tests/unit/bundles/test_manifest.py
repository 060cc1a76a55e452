"""bundles/manifest.py: what is no manifest of ours is refused, and why is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bundles.manifest import SCHEMA_VERSION, Manifest, file_sha256
from neuronpipe.core.errors import SetupError
from tests.unit.bundles.written import manifest
from tests.unit.model_specs import image_spec, model_spec


def _written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "manifest.json"
    path.write_text(json.dumps(content))
    return path


def test_a_manifest_comes_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(manifest().model_dump_json())
    assert Manifest.read(path) == manifest()


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_is_refused_before_anything_else_of_it_is_read(version: int, tmp_path: Path) -> None:
    path = _written(tmp_path, {"schema_version": version, "shape_of_things_to_come": True})
    with pytest.raises(SetupError, match=rf"schema version {version}, this neuronpipe reads {SCHEMA_VERSION}; "):
        Manifest.read(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\ufeff{}", '{"schema_version": "new"}'], ids=repr)
def test_what_is_no_manifest_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(SetupError, match=f"^{path}: not a valid manifest: "):
        Manifest.read(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b'{"schema_version": 1, "x": "\xff"}')
    with pytest.raises(SetupError, match="not a valid manifest"):
        Manifest.read(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    content = manifest().model_dump(mode="json")
    del content["model"]["max_tokens"]
    with pytest.raises(SetupError, match=r"model\.max_tokens: Field required"):
        Manifest.read(_written(tmp_path, content))


@pytest.mark.parametrize("task", ["text_generation", "text_classification"])
@pytest.mark.parametrize("size", [None, 0])
def test_a_model_of_texts_without_the_size_of_its_vocabulary_is_refused(
    task: str, size: int | None, tmp_path: Path
) -> None:
    content = manifest(model=model_spec(task)).model_dump(mode="json")
    if content["model"].pop("vocabulary_size") and size is not None:
        content["model"]["vocabulary_size"] = size
    path = _written(tmp_path, content)
    problem = rf"^{path}: .* model: vocabulary_size: is missing, .*; compile the model agai"
    with pytest.raises(SetupError, match=problem):
        Manifest.read(path)


def test_a_model_of_images_alone_needs_no_vocabulary(tmp_path: Path) -> None:
    content = manifest(model=image_spec()).model_dump(mode="json")
    del content["model"]["vocabulary_size"]
    assert Manifest.read(_written(tmp_path, content)).model.vocabulary_size == 0


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    content = manifest().model_dump(mode="json") | {"colour": "red"}
    with pytest.raises(SetupError, match="colour: Extra inputs are not permitted"):
        Manifest.read(_written(tmp_path, content))


def test_a_manifest_without_an_artefact_is_refused(tmp_path: Path) -> None:
    content = manifest().model_dump(mode="json") | {"artifacts": []}
    with pytest.raises(SetupError, match="artifacts: "):
        Manifest.read(_written(tmp_path, content))


def test_a_digest_is_the_sha256_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1: SHA-256 of "abc".
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def _filling_masks() -> dict[str, Any]:
    return manifest(model=model_spec(task="fill_mask")).model_dump(mode="json")


def test_a_fact_that_a_task_needs_is_named_where_it_is_missing(tmp_path: Path) -> None:
    content = _filling_masks()
    del content["model"]["facts"]["fill_mask"]["mask_token_id"]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SetupError, match=r"facts\.fill_mask\.mask_token_id: Field required"):
        Manifest.read(path)


def test_a_fact_that_no_task_knows_is_refused(tmp_path: Path) -> None:
    content = _filling_masks()
    content["model"]["facts"]["fill_mask"]["colour"] = "red"
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SetupError, match=r"facts\.fill_mask\.colour: Extra inputs are not permitted"):
        Manifest.read(path)


@pytest.mark.parametrize(
    "model", [[], {"task": ["a"]}, {"also_answers": 3}, {"facts": []}, {"facts": {"rerank": 1}}], ids=repr
)
def test_a_model_of_another_shape_is_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "model": model}))
    with pytest.raises(SetupError, match="not a valid manifest: "):
        Manifest.read(path)
