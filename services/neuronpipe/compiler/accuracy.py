"""Compares an artefact with the PyTorch float32 original on batches of sample text, which this file also chooses.

The agreement of their answers is a number from 0 to 1, whose meaning the task defines.

The comparison and int8 calibration each use English text of the Python manual, and other languages. They share no text:
the comparison takes the manual's first half and every second of `sentences`. Calibration takes the other half, or the
texts of a file, or the images of a folder.
"""

import dataclasses
import functools
import itertools
import json
import pydoc_data.topics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from neuronpipe.bundles.manifest import Accuracy, Artifact, Calibration, file_sha256
from neuronpipe.compiler.conversion import ArtifactCompiler, Conversion
from neuronpipe.compiler.images import encode_image_files
from neuronpipe.compiler.modules import MASK, Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import read_lines
from neuronpipe.tasks import TASKS

_SENTENCES = Path(__file__).with_name("sentences.json")

Sample: TypeAlias = str | Path  # a text, or the file of an image

BUILT_IN = "built-in sample text in 17 languages"
BUILT_IN_IMAGES = "built-in sample images"

# Batches of texts of about these numbers of words. Rows of a batch differ in length, so that padding is compared as
# well. The agreement is a share of texts: among 126 texts, one text is 0.8 %, hence the many short texts. With these
# texts, comparing all-MiniLM-L6-v2 takes some 4 s (measured, 2 busy cores).
_SHORT = ((3, 18, 6, 9, 14, 25, 5, 11, 4, 20, 8, 16, 2, 12, 7, 30),) * 4
_BATCHES = ((9, 14), (2,), (25, 3, 60, 11, 30, 7, 18), (120, 90, 15), *_SHORT, (100_000,))
_ROWS = 16
# Attention to all tokens of a text grows with their square: for 32,768 tokens it takes 4 GB in a layer.
_MOST_TOKENS = 4096
# The largest difference of an output between a text alone and beside a longer text, as a share of the largest output.
# Sums in another order make 1e-6; ConvBERT and Nystromformer make 1e-2 (90 architectures of two layers, 2026-11-27).
_PADDING_DIFFERENCE = 3e-4
# Number of batches that are checked: the batches with the most padding.
_PADDED_BATCHES = 3

# Batches for image models, which take longer. Each image is made from its words. 32 images take ViT-base 30 s (2 CPUs).
_IMAGE_BATCHES = ((4,) * 5, (4,), *((4,) * 8,) * 3, (4, 4))

# Lengths of 60 texts of 2 to 120 words, mostly a sentence or two, beside 64 texts in other languages. With more English
# texts the ranges fit other texts less well (docs/decisions/0020).
_CALIBRATION = (8, 20, 4, 12, 30, 6, 16, 50, 2, 25, 10, 40, 14, 5, 120) * 4


@functools.cache
def sentences() -> Mapping[str, Sequence[str]]:
    """Reads sentences in languages other than English: the same six in each of sixteen languages, in eleven scripts."""
    return json.loads(_SENTENCES.read_text(encoding="utf-8"))


def comparison_batches(module: SourceModule, samples: Sequence[Sample] = ()) -> Sequence[SampleBatch]:
    """Batches of up to 16 `samples`, or else of sample texts or images; the longest has at most 4,096 tokens."""
    if samples:
        return [_encode(module, samples[row : row + _ROWS]) for row in range(0, len(samples), _ROWS)]
    encode = SOURCE_TASKS[module.task].encode
    words = iter(_manual()[0])
    batches = _IMAGE_BATCHES if module.takes_images else _BATCHES
    # At most as many words as the model has token positions, because each word is at least one token.
    longest = min(module.max_tokens, _MOST_TOKENS)
    limited = dataclasses.replace(module, max_tokens=longest)
    english = [encode(limited, _cut(words, (min(length, longest) for length in lengths))) for lengths in batches]
    if module.takes_images:
        return english
    others = [sentence for translations in sentences().values() for sentence in translations[1::2]]
    return [
        *english[:-1],
        *(encode(module, others[row : row + _ROWS]) for row in range(0, len(others), _ROWS)),
        english[-1],
    ]


def sample_prompts(module: SourceModule, lengths: Sequence[int]) -> list[list[int]]:
    """Returns the tokens of texts of about these numbers of words, without padding. Leaves out texts without tokens."""
    tokenizer = module.tokenizer.transformers_tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in _cut(iter(_manual()[0]), lengths)]
    return [[int(token_id) for token_id in ids] for ids in prompts if ids]


def calibration_batches(module: SourceModule, samples: Iterable[Sample]) -> Sequence[SampleBatch]:
    """Encodes each text or image in a batch of its own: padding would count among the values of its layers."""
    return [_encode(module, [sample]) for sample in samples]


def _encode(module: SourceModule, samples: Sequence[Sample]) -> SampleBatch:
    if files := [sample for sample in samples if isinstance(sample, Path)]:
        return encode_image_files(module, files)
    return SOURCE_TASKS[module.task].encode(module, [str(sample) for sample in samples])


def calibration_texts() -> Sequence[str]:
    """Returns texts of many lengths, none of which is in the comparison."""
    others = [translations[::2] for translations in sentences().values()]
    long = [" ".join(translations) for translations in others]
    return [*_cut(iter(_manual()[1]), _CALIBRATION), *itertools.chain(*others), *long]


def _manual() -> tuple[list[str], list[str]]:
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    return words[: len(words) // 2], words[len(words) // 2 :]


def _cut(words: Iterable[str], lengths: Iterable[int]) -> list[str]:
    return [" ".join(itertools.islice(words, length)) for length in lengths]


# Half of the texts calibrate. The embeddings of all-MiniLM-L6-v2 have a mean cosine similarity to float32 of 0.994 with
# 32 texts of the Python manual. With 300 texts it is 0.995 (measured over 128 other texts; docs/decisions/0008). With
# fewer texts, an odd text counts for too much.
MIN_TEXTS = 64
# More texts only take longer. Sources: NNCF's default of subset_size; the number of samples without a file.
MAX_TEXTS, MAX_COMPARED = 300, 128
_MAX_BYTES = 64 * 1024 * 1024
_IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The texts or images that calibrate, their description, and `compared`: others of the same source, if any."""

    texts: Sequence[Sample]
    description: Calibration
    compared: Sequence[Sample] = ()


def read_calibration(path: Path) -> CalibrationTexts:
    """Reads the texts of a file, UTF-8 with one text on each line, or the images of a folder and its subfolders.

    Empty lines and repeated texts do not count. Every second text is kept for the comparison. If there are more than
    MAX_TEXTS or MAX_COMPARED texts, texts at even distances are taken, so that all parts of a sorted file are used.
    Images are taken in the same way, by their names. Raises SetupError, which names the line or the limit.
    """
    samples: list[Sample]
    if path.is_dir():
        samples = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _IMAGE_SUFFIXES]
        kind, digest = f"images ({', '.join(_IMAGE_SUFFIXES)})", None
    else:
        lines = read_lines(path, "--calibration", max_bytes=_MAX_BYTES)
        samples = list(dict.fromkeys(line.strip() for _, line in lines))
        kind, digest = "different texts, one a line", file_sha256(path)
    if len(samples) < MIN_TEXTS:
        raise SetupError(f"--calibration {path}: {len(samples)} {kind}; calibration takes at least {MIN_TEXTS}")
    texts, compared = _spread(samples[::2], MAX_TEXTS), _spread(samples[1::2], MAX_COMPARED)
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=str(path), source_sha256=digest), compared)


def built_in_calibration(*, of_images: bool) -> CalibrationTexts:
    """Returns sample texts; for a model of images, images are made from them."""
    texts = calibration_texts()
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=BUILT_IN_IMAGES if of_images else BUILT_IN))


def _spread(samples: Sequence[Sample], max_samples: int) -> Sequence[Sample]:
    if len(samples) <= max_samples:
        return samples
    return [samples[number * len(samples) // max_samples] for number in range(max_samples)]


def agreement(
    task: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[SampleBatch]
) -> float | None:
    """Computes the agreement over all texts of all batches; None for a model such as a classifier with one label."""
    source_task = SOURCE_TASKS[task]
    measured = [
        source_task.measure(outputs_of_batch, expected, batch)
        for outputs_of_batch, expected, batch in zip(outputs, reference, batches, strict=True)
    ]
    agreements_of_batches = [agreements for agreements in measured if agreements is not None]
    return float(source_task.combine(np.concatenate(agreements_of_batches))) if agreements_of_batches else None


def reference_outputs(module: SourceModule, batches: Sequence[SampleBatch]) -> list[Outputs]:
    """Computes the original's outputs, before the conversion. Raises SetupError if they are NaN."""
    with torch.inference_mode():
        outputs = [_run(module, batch) for batch in batches]
    with np.errstate(invalid="ignore"):
        difference = largest_difference(module.per_token_outputs, outputs, outputs, batches)  # also NaN for infinities
    if np.isnan(difference):
        raise damaged(module)
    return outputs


def damaged(module: SourceModule) -> SetupError:
    return SetupError(
        f"{module.config.name_or_path}: the outputs of {module.architecture} are also NaN or infinite in PyTorch: "
        "its weights are damaged, or a number in its configuration; train it again"
    )


def check_padding(module: SourceModule, batches: Sequence[SampleBatch], reference: Sequence[Outputs]) -> None:
    """Raises SetupError if the outputs for a text change beside a longer text, as with convolutions."""
    if module.image:
        return
    lengths = [batch[MASK].sum(axis=1) for batch in batches]
    for number in sorted(range(len(batches)), key=lambda number: int(np.ptp(lengths[number])))[-_PADDED_BATCHES:]:
        batch, expected, row = batches[number], reference[number], int(lengths[number].argmin())
        tokens = int(lengths[number][row])
        if tokens == batch[MASK].shape[1]:
            continue
        with torch.inference_mode():
            outputs = _run(module, {name: array[row : row + 1, :tokens] for name, array in batch.items()})
        for name, alone in outputs.items():
            beside = expected[name][row, :tokens] if name in module.per_token_outputs else expected[name][row]
            difference = float(np.abs(alone[0] - beside).max())
            if difference > _PADDING_DIFFERENCE * float(np.abs(expected[name]).max()):
                raise SetupError(
                    f"{module.config.name_or_path}: the outputs of {module.architecture} for a text change by "
                    f"{difference:.2e} beside a longer one, because it reads padding as text, which is not supported; "
                    "compile a model that masks padding, such as BERT"
                )


def measure(
    compiler: ArtifactCompiler,
    conversion: Conversion,
    artifact: Artifact,
    batches: Sequence[SampleBatch],
    reference: Sequence[Outputs],
    sample_texts: str,
) -> Accuracy | None:
    """Measures the artefact's agreement with the reference, and its largest difference from it, without padding."""
    ran = compiler.run(conversion, artifact, batches)
    if ran is None:
        return None
    module, outputs, computed_dtype = conversion.module, ran.outputs, ran.computed_dtype
    emulations: dict[str, float | None] = {}
    if computed_dtype != artifact.dtype:
        with torch.inference_mode(), torch.autocast("cpu", dtype=getattr(torch, artifact.dtype)):
            emulated = [_run(module, batch) for batch in batches]
        emulations = {
            "emulated_difference": largest_difference(module.per_token_outputs, emulated, reference, batches),
            "emulated_agreement": agreement(module.task, emulated, reference, batches),
        }
    return Accuracy(
        samples=sum(module.shape_of(batch)[0] for batch in batches),
        sample_texts=sample_texts,
        sample_shapes=tuple(module.shape_of(batch) for batch in batches),
        largest_output=max(
            float(np.abs(array).max()) for outputs_of_batch in reference for array in outputs_of_batch.values()
        ),
        largest_difference=largest_difference(module.per_token_outputs, outputs, reference, batches),
        computed_dtype=computed_dtype,
        emulator=ran.emulator,
        agreement=agreement(module.task, outputs, reference, batches),
        **emulations,
    )


def describe(accuracy: Accuracy, dtype: str, task: str) -> str:
    line = (
        f"      largest difference {accuracy.largest_difference:.2e} over {accuracy.samples} samples of up to "
        f"{max(tokens for _, tokens in accuracy.sample_shapes)} tokens (largest output {accuracy.largest_output:.3g})"
    )
    if accuracy.agreement is not None:
        line += f"\n      agreement {accuracy.agreement:.4f} ({SOURCE_TASKS[task].meaning})"
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
            f"{dtype} differs by {accuracy.emulated_difference:.2e}"
        )
    return line


def check(accuracy: Accuracy | None, max_divergence: float | None, min_agreement: float | None) -> None:
    """Raises SetupError if the artefact is beyond a limit, or if there is a limit and nothing was measured."""
    if accuracy is None:
        if max_divergence is not None or min_agreement is not None:
            limits = "leave out --max-divergence and --min-agreement"
            raise SetupError(f"this back end's artefacts are not compared with PyTorch; {limits}")
        return
    worst = float(np.max([accuracy.largest_difference, accuracy.emulated_difference or 0]))
    if not np.isfinite(worst):
        raise SetupError("the artefact's outputs are NaN or infinite for some sample texts")
    if max_divergence is not None and worst > max_divergence:
        raise SetupError(
            f"the artefact differs from PyTorch float32 by {worst:.2e}, the limit is {max_divergence:.2e} "
            "(--max-divergence)"
        )
    if min_agreement is None:
        return
    if not _agreements(accuracy):
        raise SetupError(
            "a model with one label has no agreement to measure; use --max-divergence instead of --min-agreement"
        )
    if not agrees(accuracy, min_agreement):
        raise SetupError(
            f"the artefact's agreement with PyTorch float32 is {min(_agreements(accuracy)):.6g}, the limit is "
            f"{min_agreement:g} (--min-agreement)"
        )


def agrees(accuracy: Accuracy | None, min_agreement: float) -> bool:
    """Returns whether an artefact agrees with the original by `min_agreement` or more, or cannot be measured."""
    return accuracy is None or all(value >= min_agreement for value in _agreements(accuracy))


def _agreements(accuracy: Accuracy) -> list[float]:
    return [value for value in (accuracy.agreement, accuracy.emulated_agreement) if value is not None]


def _run(module: SourceModule, batch: SampleBatch) -> Outputs:
    result = module.module(**{name: torch.from_numpy(batch[name]) for name in module.inputs})
    return {name: tensor.float().numpy() for name, tensor in result.items()}


def largest_difference(
    per_token: Collection[str], outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[SampleBatch]
) -> float:
    """Returns the largest difference of any output, which may be NaN. `per_token`: outputs without padding."""
    differences = []
    for computed, expected, batch in zip(outputs, reference, batches, strict=True):
        for name, array in expected.items():
            difference = np.abs(computed[name] - array)
            differences.append((difference[batch["attention_mask"] == 1] if name in per_token else difference).max())
    return float(np.max(differences))  # unlike np.max, max() takes NaN for smaller than other numbers
