"""bundles/manifest.py: what is no manifest of ours is refused, and why is said."""

import functools
import json
import operator
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


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xef\xbb\xbf{}", b'{"schema_version": "new"}', b'{"schema_version": 1, "x": "\xff"}'],
)
def test_what_is_no_manifest_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=f"^{path}: not a valid manifest: "):
        Manifest.read(path)


@pytest.mark.parametrize("task", ["text_generation", "text_classification"])
@pytest.mark.parametrize("size", [None, 0])
def test_a_model_of_texts_without_a_vocabulary_size_is_refused(task: str, size: int | None, tmp_path: Path) -> None:
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


_FACTS = ("model", "facts", "fill_mask")


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("model", "max_tokens"), None, r"model\.max_tokens: Field required"),
        (("colour",), "red", "colour: Extra inputs are not permitted"),
        (("artifacts",), [], "artifacts: "),
        ((*_FACTS, "mask_token_id"), None, r"facts\.fill_mask\.mask_token_id: Field required"),
        ((*_FACTS, "colour"), "red", r"facts\.fill_mask\.colour: Extra inputs are not permitted"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_a_field_that_is_missing_unknown_or_empty_is_named(
    tmp_path: Path, place: tuple[str, ...], value: Any, problem: str
) -> None:
    content = manifest(model=model_spec(task="fill_mask")).model_dump(mode="json")
    *folders, name = place
    fields = functools.reduce(operator.getitem, folders, content)
    if value is None:
        del fields[name]
    else:
        fields[name] = value
    with pytest.raises(SetupError, match=problem):
        Manifest.read(_written(tmp_path, content))


def test_a_digest_is_the_sha256_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1: SHA-256 of "abc".
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    "model", [[], {"task": ["a"]}, {"also_answers": 3}, {"facts": []}, {"facts": {"rerank": 1}}], ids=repr
)
def test_a_model_of_another_shape_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="not a valid manifest: "):
        Manifest.read(_written(tmp_path, {"schema_version": SCHEMA_VERSION, "model": model}))
