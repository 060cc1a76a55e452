"""Compares an artefact with the PyTorch float32 original on batches of sample text, which is here, too.

The agreement of their answers is one number from 0 to 1, whose meaning the task defines.

The comparison and int8 calibration each have English text of the Python manual, and other languages. They share no
text: the comparison takes the manual's first half and every second of `sentences`, calibration takes the others, or the
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
from neuronpipe.compiler.modules import MASK, Batch, Outputs, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import read_lines
from neuronpipe.tasks import TASKS

_SENTENCES = Path(__file__).with_name("sentences.json")

Sample: TypeAlias = str | Path  # a text, or the file of an image

BUILT_IN = "built-in sample text in 17 languages"
BUILT_IN_IMAGES = "built-in sample images"

# Batches of texts of about these many words; rows of one batch differ in length, so that padding is compared too. The
# many short texts are for the agreement, of which one text of 126 is 0.8 %. With them comparing all-MiniLM-L6-v2 takes
# some 4 s (measured, 2 busy cores).
_SHORT = ((3, 18, 6, 9, 14, 25, 5, 11, 4, 20, 8, 16, 2, 12, 7, 30),) * 4
_BATCHES = ((9, 14), (2,), (25, 3, 60, 11, 30, 7, 18), (120, 90, 15), *_SHORT, (100_000,))
_ROWS = 16
# Attention to all tokens of a text grows with their square: of 32,768 tokens it has 4 GB in a layer.
_MOST_TOKENS = 4096
# The largest difference of an output, as a share of the largest one, between a text alone and beside a longer one. Sums
# in another order make 1e-6; ConvBERT and Nystromformer, 1e-2 (90 architectures of two layers, 2026-11-27).
_PADDING_DIFFERENCE = 3e-4
# Of the batches with the most padding.
_PADDED_BATCHES = 3

# For image models, which take longer. Each image is made from its words. 32 images take ViT-base 30 s (2 CPUs).
_IMAGE_BATCHES = ((4,) * 5, (4,), *((4,) * 8,) * 3, (4, 4))

# 60 texts of 2 to 120 words, mostly a sentence or two, beside 64 in other languages. Of more English texts the ranges
# fit others less well (docs/decisions/0020).
_CALIBRATION = (8, 20, 4, 12, 30, 6, 16, 50, 2, 25, 10, 40, 14, 5, 120) * 4


@functools.cache
def sentences() -> Mapping[str, Sequence[str]]:
    """Sentences in languages other than English: the same six in each, of sixteen languages and eleven scripts.

    Written for this project. They are about ordinary things and of very different lengths.
    """
    found: Mapping[str, Sequence[str]] = json.loads(_SENTENCES.read_text(encoding="utf-8"))
    return found


def comparison_batches(module: SourceModule, samples: Sequence[Sample] = ()) -> Sequence[Batch]:
    """Batches of one to sixteen texts or images: `samples`, or else sample text, or images made from it.

    The last sample text is as long as the model allows, or has 4,096 tokens where that is less.
    """
    if samples:
        return [_encode(module, samples[row : row + _ROWS]) for row in range(0, len(samples), _ROWS)]
    encode = SOURCE_TASKS[module.task].encode
    words = iter(_manual()[0])
    batches = _IMAGE_BATCHES if module.takes_images else _BATCHES
    # Not more words than the model has token positions, because each word is at least one token.
    longest = min(module.max_tokens, _MOST_TOKENS)
    limited = dataclasses.replace(module, max_tokens=longest)
    english = [encode(limited, _cut(words, (min(length, longest) for length in lengths))) for lengths in batches]
    if module.takes_images:
        return english
    others = [sentence for one in sentences().values() for sentence in one[1::2]]
    return [
        *english[:-1],
        *(encode(module, others[row : row + _ROWS]) for row in range(0, len(others), _ROWS)),
        english[-1],
    ]


def sample_prompts(module: SourceModule, lengths: Sequence[int]) -> list[list[int]]:
    """Tokens of texts of about these many words, without padding, each of one token at least."""
    tokenizer = module.tokenizer.transformers_tokenizer
    found = [tokenizer(text)["input_ids"] for text in _cut(iter(_manual()[0]), lengths)]
    return [[int(token_id) for token_id in ids] for ids in found if ids]


def calibration_batches(module: SourceModule, samples: Iterable[Sample]) -> Sequence[Batch]:
    """Each text or image as an input of the model's task, in a batch of its own.

    In a shared batch, padding would count among the values of its layers.
    """
    return [_encode(module, [sample]) for sample in samples]


def _encode(module: SourceModule, samples: Sequence[Sample]) -> Batch:
    if files := [sample for sample in samples if isinstance(sample, Path)]:
        return encode_image_files(module, files)
    return SOURCE_TASKS[module.task].encode(module, [str(sample) for sample in samples])


def calibration_texts() -> Sequence[str]:
    """Texts of many lengths, none of which is in the comparison."""
    others = [one[::2] for one in sentences().values()]
    long = [" ".join(one) for one in others]
    return [*_cut(iter(_manual()[1]), _CALIBRATION), *itertools.chain(*others), *long]


def _manual() -> tuple[list[str], list[str]]:
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    return words[: len(words) // 2], words[len(words) // 2 :]


def _cut(words: Iterable[str], lengths: Iterable[int]) -> list[str]:
    return [" ".join(itertools.islice(words, length)) for length in lengths]


# Half of them calibrate. With 32 texts of the Python manual the embeddings of all-MiniLM-L6-v2 have a mean cosine
# similarity of 0.994 to those of float32, with 300 of 0.995 (measured over 128 others; docs/decisions/0008). With
# fewer, one odd text counts for too much.
MIN_TEXTS = 64
# More texts only take longer. Sources: NNCF's default of subset_size; about as many samples as there are without a
# file.
MAX_TEXTS, MAX_COMPARED = 300, 128
_MAX_BYTES = 64 * 1024 * 1024
_IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The texts, or the files of the images, and for the manifest their source.

    `compared` are others of the same source; of built-in samples there are none.
    """

    texts: Sequence[Sample]
    description: Calibration
    compared: Sequence[Sample] = ()


def read_calibration(path: Path) -> CalibrationTexts:
    """The texts of a file, UTF-8 with one text on each line, or the images of a folder and of those in it.

    Empty lines and repeated texts do not count. Every second text is kept for the comparison. Of more than MAX_TEXTS
    and MAX_COMPARED texts, that many are taken at even distances, so that all parts of a sorted file are used. Images
    are taken likewise, by their names. Raises SetupError, which names the line or the limit.
    """
    found: list[Sample]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _IMAGE_SUFFIXES]
        what, digest = f"images ({', '.join(_IMAGE_SUFFIXES)})", None
    else:
        lines = read_lines(path, "--calibration", max_bytes=_MAX_BYTES)
        found = list(dict.fromkeys(line.strip() for _, line in lines))
        what, digest = "different texts, one a line", file_sha256(path)
    if len(found) < MIN_TEXTS:
        raise SetupError(f"--calibration {path}: {len(found)} {what}; calibration takes at least {MIN_TEXTS}")
    texts, compared = _spread(found[::2], MAX_TEXTS), _spread(found[1::2], MAX_COMPARED)
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=str(path), source_sha256=digest), compared)


def built_in_calibration(*, of_images: bool) -> CalibrationTexts:
    """Sample text, from which images are made for a model of images."""
    texts = calibration_texts()
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=BUILT_IN_IMAGES if of_images else BUILT_IN))


def _spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    return samples if len(samples) <= most else [samples[number * len(samples) // most] for number in range(most)]


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


def reference_outputs(module: SourceModule, batches: Sequence[Batch]) -> list[Outputs]:
    """The original's outputs, computed before the conversion. Raises SetupError if they are NaN."""
    with torch.inference_mode():
        outputs = [_run(module, batch) for batch in batches]
    with np.errstate(invalid="ignore"):
        difference = largest_difference(module.per_token_outputs, outputs, outputs, batches)  # NaN for infinities, too
    if np.isnan(difference):
        raise damaged(module)
    return outputs


def damaged(module: SourceModule) -> SetupError:
    """The error of a model whose outputs are NaN or infinite before it is converted."""
    return SetupError(
        f"{module.config.name_or_path}: the outputs of {module.architecture} are also NaN or infinite in PyTorch: "
        "its weights are damaged, or a number in its configuration; train it again"
    )


def check_padding(module: SourceModule, batches: Sequence[Batch], reference: Sequence[Outputs]) -> None:
    """Raises SetupError for a model with other outputs for a text beside a longer one than for the text alone.

    Convolutions and landmarks over all positions of a batch ignore its mask.
    """
    if module.image:
        return
    lengths = [batch[MASK].sum(axis=1) for batch in batches]
    for number in sorted(range(len(batches)), key=lambda one: int(np.ptp(lengths[one])))[-_PADDED_BATCHES:]:
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
                    f"{difference:.2e} beside a longer one, because it reads padding as text, which is not supported"
                )


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
        with torch.inference_mode(), torch.autocast("cpu", dtype=getattr(torch, artifact.dtype)):
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
    """Whether the artefact's agreement with the original is at least this.

    It is true if there is no agreement to measure.
    """
    return accuracy is None or all(value >= min_agreement for value in _agreements(accuracy))


def _agreements(accuracy: Accuracy) -> list[float]:
    return [value for value in (accuracy.agreement, accuracy.emulated_agreement) if value is not None]


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
