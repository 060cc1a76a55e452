"""Artefacts by all that they depend on. The Neuron SDK's own cache does not cover what torch_neuronx.trace makes."""

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
    """A folder of artefacts `<digest of the stamp>.pt`, each with its stamp and its own digest beside it. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError for a folder that cannot be made."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"{folder}: cannot be made: {os.strerror(error.errno or 0)}; see --compile-cache") from error

    def find(self, stamp: Stamp) -> Path | None:
        """The artefact of a stamp, or None where there is none, or a broken one."""
        path = self._path(stamp)
        try:
            described = json.loads(path.with_suffix(".json").read_text())
            is_whole = described["stamp"] == stamp and described["sha256"] == file_sha256(path)
        except (OSError, ValueError, KeyError):
            return None
        return path if is_whole else None

    def add(self, stamp: Stamp, artifact: Path) -> None:
        """Keeps an artefact: whole or not at all."""
        path = self._path(stamp)
        with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as folder:
            copy, description = Path(folder) / "artifact", Path(folder) / "description"
            shutil.copyfile(artifact, copy)
            description.write_text(json.dumps({"stamp": stamp, "sha256": file_sha256(copy)}, indent=2) + "\n")
            copy.replace(path)
            description.replace(path.with_suffix(".json"))

    def _path(self, stamp: Stamp) -> Path:
        return self._folder / (hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest() + ".pt")
