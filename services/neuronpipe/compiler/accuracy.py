"""Compares an artefact with the PyTorch float32 original on batches of sample text.

The agreement of their answers is one number from 0 to 1, whose meaning the task defines.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler.conversion import ArtifactCompiler, Conversion
from neuronpipe.compiler.modules import Batch, Outputs, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS


def agreement(
    task: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[Batch]
) -> float | None:
    """The agreement over all texts of all batches.

    It is None for a model without one, such as a classifier with one label.
    """
    source_task = SOURCE_TASKS[task]
    measured = [
        source_task.measure(one, expected, batch)
        for one, expected, batch in zip(outputs, reference, batches, strict=True)
    ]
    of_texts = [one for one in measured if one is not None]
    return float(source_task.combine(np.concatenate(of_texts))) if of_texts else None


def meaning(task: str) -> str:
    """The meaning of the number, for a user."""
    return SOURCE_TASKS[task].meaning


_TORCH_DTYPES = {"bfloat16": torch.bfloat16}


def reference_outputs(module: SourceModule, batches: Sequence[Batch]) -> list[Outputs]:
    """The original's outputs, computed before the conversion. Raises SetupError if they are NaN."""
    with torch.inference_mode():
        outputs = [_run(module, batch) for batch in batches]
    with np.errstate(invalid="ignore"):
        difference = largest_difference(module.per_token_outputs, outputs, outputs, batches)  # NaN for infinities, too
    if np.isnan(difference):
        raise SetupError(
            f"the outputs of {module.architecture} are NaN or infinite in PyTorch, too: its weights are damaged; "
            "train it again"
        )
    return outputs


def measure(
    compiler: ArtifactCompiler,
    conversion: Conversion,
    artifact: Artifact,
    batches: Sequence[Batch],
    reference: Sequence[Outputs],
    sample_texts: str,
) -> Accuracy | None:
    """The artefact's agreement with the reference, and its largest difference to it, on tokens that are not padding.

    `sample_texts` says where the texts of the batches come from.
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
        emulated_difference=None
        if emulated is None
        else largest_difference(module.per_token_outputs, emulated, reference, batches),
        agreement=agreement(module.task, outputs, reference, batches),
        emulated_agreement=None if emulated is None else agreement(module.task, emulated, reference, batches),
    )


def describe(accuracy: Accuracy, dtype: str, task: str) -> str:
    """A few lines for a user."""
    line = (
        f"      largest difference {accuracy.largest_difference:.2e} over {accuracy.samples} samples of up to "
        f"{max(tokens for _, tokens in accuracy.sample_shapes)} tokens (largest output {accuracy.largest_output:.3g})"
    )
    if accuracy.agreement is not None:
        line += f"\n      agreement {accuracy.agreement:.4f} ({meaning(task)})"
    line += f"\n      measured on {accuracy.sample_texts}" + (
        "; other texts may differ more" if dtype.startswith("int8") else ""
    )
    if accuracy.emulator:
        line += f"\n      computed by {accuracy.emulator}"
        if not TASKS[task].generates:
            line += "; `neuronpipe accept` compares on the device"
    if accuracy.emulated_difference is not None:
        line += (
            f"\n      this CPU has no {dtype} instructions and computed in {accuracy.computed_dtype}; PyTorch in "
            f"{dtype} differs by "
            f"{accuracy.emulated_difference:.2e}"
        )
    return line


def check(accuracy: Accuracy | None, max_divergence: float | None, min_agreement: float | None) -> None:
    """Raises SetupError for an artefact beyond a limit, and for a limit if nothing was measured."""
    if accuracy is None:
        if max_divergence is not None or min_agreement is not None:
            raise SetupError(
                "this back end's artefacts are not compared with PyTorch; leave out --max-divergence and "
                "--min-agreement"
            )
        return
    worst = float(np.max([accuracy.largest_difference, accuracy.emulated_difference or 0]))
    if not np.isfinite(worst):
        raise SetupError("the artefact's outputs are NaN or infinite for some sample texts")
    if max_divergence is not None and worst > max_divergence:
        raise SetupError(
            f"the artefact differs from PyTorch float32 by {worst:.2e}, the limit is {max_divergence:.2e} "
            "(--max-divergence)"
        )
    if min_agreement is not None:
        _check_agreement(accuracy, min_agreement)


def agrees(accuracy: Accuracy | None, min_agreement: float) -> bool:
    """Whether the artefact's agreement with the original is at least this.

    It is true if there is no agreement to measure.
    """
    return accuracy is None or all(value >= min_agreement for value in _agreements(accuracy))


def _agreements(accuracy: Accuracy) -> list[float]:
    return [value for value in (accuracy.agreement, accuracy.emulated_agreement) if value is not None]


def _check_agreement(accuracy: Accuracy, min_agreement: float) -> None:
    if not _agreements(accuracy):
        raise SetupError(
            "a model with one label has no agreement to measure; use --max-divergence in place of --min-agreement"
        )
    if not agrees(accuracy, min_agreement):
        raise SetupError(
            f"the artefact's agreement with PyTorch float32 is {min(_agreements(accuracy)):.6g}, the limit is "
            f"{min_agreement:g} "
            "(--min-agreement)"
        )


def _run(module: SourceModule, batch: Batch) -> Outputs:
    result = module.module(**{name: torch.from_numpy(batch[name]) for name in module.inputs})
    return {name: tensor.float().numpy() for name, tensor in result.items()}


def largest_difference(
    per_token: Collection[str], outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[Batch]
) -> float:
    """The largest difference of any output; NaN if one is. `per_token` names outputs of which padding is left out."""
    differences = []
    for one, expected, batch in zip(outputs, reference, batches, strict=True):
        for name, array in expected.items():
            difference = np.abs(one[name] - array)
            differences.append((difference[batch["attention_mask"] == 1] if name in per_token else difference).max())
    return float(np.max(differences))  # not max(), for which NaN is smaller than other numbers
