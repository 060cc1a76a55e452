"""No artefact at all: a bundle for the fake back end, which needs the model's description only."""

from collections.abc import Sequence
from pathlib import Path

from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.samples import Batch
from neuronpipe.bundles.manifest import Artifact

DTYPES = ("float32",)


def convert(module: SourceModule, example: Batch, folder: Path, dtype: str) -> Artifact:
    """See ArtifactCompiler."""
    return Artifact(backend="fake", dtype=dtype)


def run(artifact: Artifact, folder: Path, batches: Sequence[Batch]) -> None:
    """See ArtifactCompiler: nothing to compare."""
