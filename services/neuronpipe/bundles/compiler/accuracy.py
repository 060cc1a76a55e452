"""Compares an artefact with the PyTorch float32 original on batches of sample text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.compiler.agreement import agreement, meaning
from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.source import ModelSource
from neuronpipe.bundles.compiler.tasks.base import Batch, Outputs
from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.compiler.neuronx import NeuronxOptions

_TORCH_DTYPES = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert: the module and a batch for it, into the bundle's folder, for these buckets where there are any."""

    module: SourceModule
    source: ModelSource
    example: Batch
    folder: Path
    dtype: str
    buckets: tuple[Bucket, ...]
    neuronx: "NeuronxOptions"
    device_times: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """An artefact's outputs for each batch, and the dtype that it computed in. `emulator` says what ran in its place, if anything did."""

    outputs: Sequence[Outputs]
    computed_dtype: str
    emulator: str = ""


class ArtifactCompiler(Protocol):
    """The part of the compiler that belongs to one back end (a module)."""

    DTYPES: tuple[str, ...]
    BUCKETS: str
    """Whether it compiles for buckets: "none", "optional" or "required"."""

    def convert(self, conversion: Conversion) -> Artifact:
        """Writes the artefact below the bundle's folder and describes it. Raises SetupError."""

    def run(self, conversion: Conversion, artifact: Artifact, batches: Sequence[Batch]) -> Ran | None:
        """Runs the artefact on every batch, or None where there is nothing to compare."""


def reference_outputs(module: SourceModule, batches: Sequence[Batch]) -> list[Outputs]:
    """The original's outputs, computed before anything is converted. Raises SetupError where they are no numbers."""
    with torch.inference_mode():
        outputs = [_run(module, batch) for batch in batches]
    with np.errstate(invalid="ignore"):
        difference = largest_difference(module.per_token_outputs, outputs, outputs, batches)  # of infinities no number, either
    if np.isnan(difference):
        raise SetupError(f"the outputs of {module.architecture} are no numbers in PyTorch either: its weights are damaged; train it again")
    return outputs


def measure(
    compiler: ArtifactCompiler,
    conversion: Conversion,
    artifact: Artifact,
    batches: Sequence[Batch],
    reference: Sequence[Outputs],
    sample_texts: str,
) -> Accuracy | None:
    """The artefact's largest difference to the reference, on tokens that are not padding, and its agreement with it.

    `sample_texts` says what the batches were made from.
    """
    ran = compiler.run(conversion, artifact, batches)
    if ran is None:
        return None
    module, outputs, computed_dtype = conversion.module, ran.outputs, ran.computed_dtype
    emulated = None
    if computed_dtype != artifact.dtype:
        with torch.inference_mode(), torch.autocast("cpu", dtype=_TORCH_DTYPES[artifact.dtype]):
            emulated = [_run(module, batch) for batch in batches]
    return Accuracy(
        samples=sum(module.shape_of(batch)[0] for batch in batches),
        sample_texts=sample_texts,
        sample_shapes=tuple(module.shape_of(batch) for batch in batches),
        largest_output=max(float(np.abs(array).max()) for one in reference for array in one.values()),
        largest_difference=largest_difference(module.per_token_outputs, outputs, reference, batches),
        computed_dtype=computed_dtype,
        emulator=ran.emulator,
        emulated_difference=None if emulated is None else largest_difference(module.per_token_outputs, emulated, reference, batches),
        agreement=agreement(module.task, outputs, reference, batches),
        emulated_agreement=None if emulated is None else agreement(module.task, emulated, reference, batches),
    )


def describe(accuracy: Accuracy, dtype: str, task: str) -> str:
    """A few lines for a person."""
    line = (
        f"      largest difference {accuracy.largest_difference:.2e} over {accuracy.samples} samples of up to "
        f"{max(tokens for _, tokens in accuracy.sample_shapes)} tokens (largest output {accuracy.largest_output:.3g})"
    )
    if accuracy.agreement is not None:
        line += f"\n      agreement {accuracy.agreement:.4f} ({meaning(task)})"
    line += f"\n      measured on {accuracy.sample_texts}" + ("; other texts may differ more" if dtype.startswith("int8") else "")
    if accuracy.emulator:
        line += f"\n      computed by {accuracy.emulator}; `neuronpipe accept` compares on the device"
    if accuracy.emulated_difference is not None:
        line += (
            f"\n      this CPU has no {dtype} instructions and computed in {accuracy.computed_dtype}; PyTorch in {dtype} differs by "
            f"{accuracy.emulated_difference:.2e}"
        )
    return line


def check(accuracy: Accuracy | None, max_divergence: float | None, min_agreement: float | None) -> None:
    """Raises SetupError for an artefact that is too far off, and where a limit is given and nothing was measured."""
    if accuracy is None:
        if max_divergence is not None or min_agreement is not None:
            raise SetupError("this back end's artefacts are not compared with PyTorch; leave out --max-divergence and --min-agreement")
        return
    worst = float(np.max([accuracy.largest_difference, accuracy.emulated_difference or 0]))
    if not np.isfinite(worst):
        raise SetupError("the artefact's outputs are not numbers for some sample texts")
    if max_divergence is not None and worst > max_divergence:
        raise SetupError(f"the artefact differs from PyTorch float32 by {worst:.2e}, the limit is {max_divergence:.2e} (--max-divergence)")
    if min_agreement is not None:
        _check_agreement(accuracy, min_agreement)


def agrees(accuracy: Accuracy | None, min_agreement: float) -> bool:
    """Whether the artefact agrees with the original by no less than this; so it does where there is no agreement to measure."""
    return accuracy is None or all(value >= min_agreement for value in _agreements(accuracy))


def _agreements(accuracy: Accuracy) -> list[float]:
    return [value for value in (accuracy.agreement, accuracy.emulated_agreement) if value is not None]


def _check_agreement(accuracy: Accuracy, min_agreement: float) -> None:
    if not _agreements(accuracy):
        raise SetupError("a model with one label has no agreement to measure; use --max-divergence in place of --min-agreement")
    if not agrees(accuracy, min_agreement):
        raise SetupError(
            f"the artefact's agreement with PyTorch float32 is {min(_agreements(accuracy)):.6g}, the limit is {min_agreement:g} "
            "(--min-agreement)"
        )


def _run(module: SourceModule, batch: Batch) -> Outputs:
    result = module.module(**{name: torch.from_numpy(batch[name]) for name in module.inputs})
    return {name: tensor.float().numpy() for name, tensor in result.items()}


def largest_difference(
    per_token: Collection[str], outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[Batch]
) -> float:
    """Of any output, on tokens that are not padding in those of `per_token`; NaN where one is."""
    differences = []
    for one, expected, batch in zip(outputs, reference, batches, strict=True):
        for name, array in expected.items():
            difference = np.abs(one[name] - array)
            differences.append((difference[batch["attention_mask"] == 1] if name in per_token else difference).max())
    return float(np.max(differences))  # not max(), which takes what is not a number for smaller
