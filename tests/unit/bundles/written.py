"""Bundles written by hand: a tokenizer file and an artefact of two files, without any model."""

from pathlib import Path
from typing import Any

from neuronpipe.bundles.manifest import SCHEMA_VERSION, Artifact, Manifest, Source
from neuronpipe.bundles.writing import new_bundle, write_manifest
from tests.unit.model_specs import model_spec


def manifest(name: str = "m", version: int = 1, **changes: Any) -> Manifest:
    """A manifest of a bundle with artefacts for two back ends."""
    files = ("artifacts/openvino/model.xml", "artifacts/openvino/model.bin")
    described: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": model_spec(name=name, version=version),
        "source": Source(location="/source", weights_sha256="0" * 64),
        "tokenizer_file": "tokenizer.json",
        "artifacts": (
            Artifact(backend="openvino", dtype="float32", files=files),
            Artifact(backend="fake", dtype="float32"),
        ),
        "files": {},
    }
    return Manifest(**described | changes)


def write_files(folder: Path) -> None:
    """The files of a bundle, but for the manifest."""
    (folder / "artifacts/openvino").mkdir(parents=True)
    (folder / "artifacts/openvino/model.xml").write_text("<model/>")
    (folder / "artifacts/openvino/model.bin").write_bytes(bytes(range(256)))
    (folder / "tokenizer.json").write_text("{}")


def write_bundle(repository: Path, name: str = "m", version: int = 1, **changes: Any) -> Path:
    """Adds a bundle to the repository and returns its folder."""
    with new_bundle(repository, name, version) as folder:
        write_files(folder)
        write_manifest(folder, manifest(name, version, **changes))
    return repository / name / str(version)
