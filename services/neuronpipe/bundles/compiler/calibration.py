"""The texts that int8 is calibrated on: those of a file, or sample text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.compiler.samples import calibration_texts
from neuronpipe.bundles.manifest import Calibration, file_sha256
from neuronpipe.core.errors import SetupError
from neuronpipe.core.lines import read_lines

# With 32 texts of the Python manual the embeddings of all-MiniLM-L6-v2 have a mean cosine similarity of 0.994 to those of float32, with 300
# of 0.995 (measured over 128 others; docs/decisions/0008). With fewer, one odd text counts for too much.
MIN_TEXTS = 32
# More bring nothing but time. Source: NNCF's default of subset_size.
MAX_TEXTS = 300
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The texts and, for the manifest, where they come from."""

    texts: Sequence[str]
    description: Calibration


def read_calibration(path: Path | None) -> CalibrationTexts:
    """The texts of a file, UTF-8 and one a line, or sample text where there is none.

    Empty lines and repeated texts do not count. Of more than MAX_TEXTS, that many are taken at even distances, so that a sorted file is
    seen whole. Raises SetupError naming the line or the limit.
    """
    if path is None:
        texts = calibration_texts()
        return CalibrationTexts(texts, Calibration(texts=len(texts), source="built-in sample text"))
    texts = list(dict.fromkeys(line.strip() for _, line in read_lines(path, "--calibration", max_bytes=_MAX_BYTES)))
    if len(texts) < MIN_TEXTS:
        raise SetupError(f"--calibration {path}: {len(texts)} different texts, one a line; calibration takes at least {MIN_TEXTS}")
    if len(texts) > MAX_TEXTS:
        texts = [texts[number * len(texts) // MAX_TEXTS] for number in range(MAX_TEXTS)]
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=str(path), source_sha256=file_sha256(path)))
