"""Copies of bundles, with other manifests."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neuronpipe.bundles.manifest import MANIFEST_FILE


@contextmanager
def changing_manifest(bundle: Path) -> Iterator[dict[str, Any]]:
    """Yields the manifest of a bundle's folder, and writes it as the block has changed it."""
    file = bundle / MANIFEST_FILE
    content = json.loads(file.read_text())
    yield content
    file.unlink()  # a copied folder may be made of links
    file.write_text(json.dumps(content))


def copy_classifier(repository: Path, folder: Path, versions: Iterable[int], *, are_told_apart: bool = False) -> None:
    """Copies version 1 of a repository's classifier into another, as these versions.

    `are_told_apart`: the versions say in their labels which they are.
    """
    for version in versions:
        copied = shutil.copytree(repository / "classifier" / "1", folder / "classifier" / str(version))
        with changing_manifest(copied) as content:
            content["model"]["version"] = version
            if are_told_apart:
                content["model"]["labels"] = [f"{version}-{label}" for label in content["model"]["labels"]]


def copy_bundle(
    source: Path, name: str, repository: Path, properties: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Copies a model's first version into a repository, which it returns, with other properties of its artifact."""
    with changing_manifest(shutil.copytree(source / name / "1", repository / name / "1")) as content:
        content["artifacts"][0]["properties"] = dict(properties)
    return repository
