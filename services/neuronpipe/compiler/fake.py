"""Makes bundles for the fake back end. Such a bundle has no artefact, only the model's description."""

from collections.abc import Sequence

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.modules import SampleBatch

DTYPES: tuple[str, ...] = ("float32",)
BUCKETS = "optional"


def convert(conversion: Conversion) -> Artifact:
    return Artifact(backend="fake", dtype=conversion.dtype, buckets=conversion.buckets)


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran | None:
    return None
