"""No artefact at all: a bundle for the fake back end, which needs the model's description only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from neuronpipe.bundles.compiler.accuracy import Conversion
from neuronpipe.bundles.compiler.samples import Batch
from neuronpipe.bundles.manifest import Artifact

DTYPES = ("float32",)
BUCKETS: Literal["optional"] = "optional"


def convert(conversion: Conversion) -> Artifact:
    """See ArtifactCompiler."""
    return Artifact(backend="fake", dtype=conversion.dtype, buckets=conversion.buckets)


def run(artifact: Artifact, folder: Path, batches: Sequence[Batch]) -> None:
    """See ArtifactCompiler: nothing to compare."""
