"""Versions of a model for tests of the registry."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE


def copy_classifier(repository: Path, folder: Path, versions: Iterable[int], *, are_told_apart: bool = False) -> None:
    """Copies version 1 of a repository's classifier into another, as these versions.

    `are_told_apart`: the versions say in their labels which they are.
    """
    for version in versions:
        copied = shutil.copytree(repository / "classifier" / "1", folder / "classifier" / str(version))
        content = json.loads((copied / MANIFEST_FILE).read_text())
        content["model"]["version"] = version
        if are_told_apart:
            content["model"]["labels"] = [f"{version}-{label}" for label in content["model"]["labels"]]
        (copied / MANIFEST_FILE).write_text(json.dumps(content))
