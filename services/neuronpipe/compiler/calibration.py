"""Finds what int8 is calibrated and compared with: the texts of a file, the images of a folder, or samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.manifest import Calibration, file_sha256
from neuronpipe.compiler.samples import BUILT_IN, BUILT_IN_IMAGES, Sample, calibration_texts
from neuronpipe.core.errors import SetupError
from neuronpipe.core.lines import read_lines

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
