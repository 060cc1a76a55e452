"""Makes bundles for the fake back end, with batch times of a device for each bucket, for simulations.

Such a bundle has no artefact, only the model's description.
"""

from collections.abc import Mapping, Sequence

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.conversion import Conversion, Ran
from neuronpipe.compiler.modules import SampleBatch
from neuronpipe.core.errors import SetupError

# AWS's figures for inf2.xlarge, which has two cores: length 128, float32 with matmult-bf16. A core's time for a batch
# is 2 x batch / throughput. No figure is published for these models on 16 or 24 cores: a simulation takes each core to
# be as fast there. Source: about-neuron/benchmarks/inf2 of aws-neuron/aws-neuron-sdk, last update 2026-02-26.
_THROUGHPUT_PER_S = {
    "inf2-bert-base": {(1, 128): 1998.21, (8, 128): 2674.19},
    "inf2-distilbert": {(1, 128): 3401.97, (16, 128): 5307.88},
}
_CORES = 2

# Name → bucket → milliseconds.
DEVICE_TIMES: Mapping[str, Mapping[str, float]] = {
    name: {f"{batch}x{tokens}": round(1000 * _CORES * batch / rate, 3) for (batch, tokens), rate in rates.items()}
    for name, rates in _THROUGHPUT_PER_S.items()
}


DTYPES: tuple[str, ...] = ("float32",)
BUCKETS = "optional"


def convert(conversion: Conversion) -> Artifact:
    times = DEVICE_TIMES.get(conversion.device_times, {})
    missing = [str(bucket) for bucket in conversion.buckets if times and str(bucket) not in times]
    if missing or (times and not conversion.buckets):
        raise SetupError(
            f"--device-times {conversion.device_times}: knows the buckets {', '.join(times)}; name those with --bucket"
        )
    written = ",".join(f"{bucket}:{time_ms:g}" for bucket, time_ms in times.items())
    properties = {"device_times_ms": written} if times else {}
    return Artifact(backend="fake", dtype=conversion.dtype, buckets=conversion.buckets, properties=properties)


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran | None:
    return None
