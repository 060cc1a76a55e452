"""A cache of artefacts for Neuron. The Neuron SDK's own cache does not cover the results of torch_neuronx.trace."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from neuronpipe.bundles.manifest import file_sha256
from neuronpipe.core.errors import SetupError

Stamp: TypeAlias = Mapping[str, Any]


class ArtifactCache:
    """A folder of artefacts, `<own digest>.pt`, and of stamps, `<digest of a stamp>.json`, which name their artefacts.

    Processes may share it. If two make the same artefact at once, the last description counts, with its own artefact.
    """

    def __init__(self, folder: Path) -> None:
        """Raises SetupError for a folder that cannot be created."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"{folder}: cannot be made: {os.strerror(error.errno or 0)}; see --compile-cache"
            ) from error

    def find(self, stamp: Stamp) -> Path | None:
        """The artefact of a stamp; None if it is missing or broken."""
        try:
            described = json.loads(self._description(stamp).read_text())
            path = self._artifact(described["sha256"])
            is_whole = described["stamp"] == stamp and described["sha256"] == file_sha256(path)
        except (OSError, ValueError, KeyError, TypeError):  # missing, or not written by this class
            return None
        return path if is_whole else None

    def add(self, stamp: Stamp, artifact: Path) -> None:
        """Stores an artefact, completely or not at all. Raises SetupError if it cannot be written."""
        try:
            with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as folder:
                copy, description = Path(folder) / "artifact", Path(folder) / "description"
                shutil.copyfile(artifact, copy)
                sha256 = file_sha256(copy)
                description.write_text(json.dumps({"stamp": stamp, "sha256": sha256}, indent=2) + "\n")
                copy.replace(self._artifact(sha256))
                description.replace(self._description(stamp))
        except OSError as error:
            raise SetupError(
                f"{self._folder}: cannot be written: {os.strerror(error.errno or 0)}; see --compile-cache"
            ) from error

    def _artifact(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.pt"

    def _description(self, stamp: Stamp) -> Path:
        return self._folder / (hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest() + ".json")
