"""Finds the layers of a model that lose most in int8.

It keeps as few of them in float32 as a limit on the agreement requires.
"""

from collections.abc import Callable, Sequence

import numpy as np

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler import accuracy
from neuronpipe.compiler.conversion import ArtifactCompiler, Conversion
from neuronpipe.compiler.modules import Batch
from neuronpipe.compiler.quantization import Quantizer

# Texts that rank the parts. They are among those that calibrate, so the comparison's texts have no say in it.
_RANKING_TEXTS = 32

Measure = Callable[[Artifact], Accuracy | None]


def rank(
    quantizer: Quantizer, compiler: ArtifactCompiler, conversion: Conversion, batches: Sequence[Batch]
) -> list[str]:
    """The model's parts; first the one with the least error in the outputs when it alone computes in float32.

    Quantizes the model once for each part. `batches` hold one text each.
    """
    sample = batches[:: max(1, len(batches) // _RANKING_TEXTS)]
    reference = accuracy.reference_outputs(conversion.module, sample)
    errors: dict[str, float] = {}
    for part in quantizer.parts:
        ran = compiler.run(conversion, quantizer.quantize((part,)), sample)
        pairs = zip(ran.outputs if ran else (), reference, strict=True)
        errors[part] = float(
            np.mean([np.mean((one[name] - array) ** 2) for one, expected in pairs for name, array in expected.items()])
        )
    return sorted(errors, key=lambda part: errors[part])


def search(
    quantizer: Quantizer, ranked: Sequence[str], measure: Measure, min_agreement: float
) -> tuple[Artifact, Accuracy | None]:
    """The artefact that meets the limit with the fewest of the ranked parts in float32, found by bisection.

    If none does, it is the artefact with all parts in float32.
    """
    fewest, most = 1, len(ranked)
    while fewest < most:
        count = (fewest + most) // 2
        if accuracy.agrees(measure(quantizer.quantize(ranked[:count])), min_agreement):
            most = count
        else:
            fewest = count + 1
    artifact = quantizer.quantize(ranked[:most])
    return artifact, measure(artifact)
