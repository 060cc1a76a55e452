"""Reads the texts with which int8 is calibrated and compared: those of a file, or sample text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.compiler.samples import BUILT_IN, calibration_texts
from neuronpipe.bundles.manifest import Calibration, file_sha256
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


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The texts and, for the manifest, their source.

    `compared` are other texts of the file; with sample text there are none.
    """

    texts: Sequence[str]
    description: Calibration
    compared: Sequence[str] = ()


def read_calibration(path: Path | None) -> CalibrationTexts:
    """The texts of a file, UTF-8 with one text on each line, or sample text if there is none.

    Empty lines and repeated texts do not count. Every second text is kept for the comparison. Of more than MAX_TEXTS
    and MAX_COMPARED texts, that many are taken at even distances, so that all parts of a sorted file are used. Raises
    SetupError, which names the line or the limit.
    """
    if path is None:
        texts = calibration_texts()
        return CalibrationTexts(texts, Calibration(texts=len(texts), source=BUILT_IN))
    lines = list(dict.fromkeys(line.strip() for _, line in read_lines(path, "--calibration", max_bytes=_MAX_BYTES)))
    if len(lines) < MIN_TEXTS:
        raise SetupError(
            f"--calibration {path}: {len(lines)} different texts, one a line; calibration takes at least {MIN_TEXTS}"
        )
    texts, compared = _spread(lines[::2], MAX_TEXTS), _spread(lines[1::2], MAX_COMPARED)
    return CalibrationTexts(
        texts, Calibration(texts=len(texts), source=str(path), source_sha256=file_sha256(path)), compared
    )


def _spread(texts: Sequence[str], most: int) -> Sequence[str]:
    return texts if len(texts) <= most else [texts[number * len(texts) // most] for number in range(most)]
