"""No artefact at all: a bundle for the fake back end, which needs the model's description only."""

from collections.abc import Sequence

from neuronpipe.bundles.compiler.accuracy import Conversion, Ran
from neuronpipe.bundles.compiler.samples import Batch
from neuronpipe.bundles.manifest import Artifact

DTYPES: tuple[str, ...] = ("float32",)
BUCKETS = "optional"


def convert(conversion: Conversion) -> Artifact:
    """See ArtifactCompiler."""
    return Artifact(backend="fake", dtype=conversion.dtype, buckets=conversion.buckets)


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[Batch]) -> Ran | None:
    """See ArtifactCompiler: nothing to compare."""
    return None
