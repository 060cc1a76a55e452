"""Makes bundles for the fake back end. They have no artefact, only the model's description."""

from collections.abc import Sequence

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.device_times import DEVICE_TIMES, format_times
from neuronpipe.compiler.modules import Batch
from neuronpipe.core.errors import SetupError

DTYPES: tuple[str, ...] = ("float32",)
BUCKETS = "optional"


def convert(conversion: Conversion) -> Artifact:
    """See ArtifactCompiler."""
    times = DEVICE_TIMES.get(conversion.device_times, {})
    missing = [str(bucket) for bucket in conversion.buckets if times and str(bucket) not in times]
    if missing or (times and not conversion.buckets):
        raise SetupError(
            f"--device-times {conversion.device_times}: knows the buckets {', '.join(times)}; name those with --bucket"
        )
    properties = {"device_times_ms": format_times(times)} if times else {}
    return Artifact(backend="fake", dtype=conversion.dtype, buckets=conversion.buckets, properties=properties)


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[Batch]) -> Ran | None:
    """See ArtifactCompiler. There is nothing to compare."""
    return None
