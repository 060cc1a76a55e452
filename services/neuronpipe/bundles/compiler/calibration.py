"""The texts that int8 is calibrated on: those of a file, or sample text."""

import codecs
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.compiler.samples import calibration_texts
from neuronpipe.bundles.manifest import Calibration
from neuronpipe.core.errors import SetupError

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
    content = _read(path)
    texts = _distinct_texts(path, content)
    if len(texts) < MIN_TEXTS:
        raise SetupError(f"{path}: {len(texts)} different texts, one a line; calibration takes at least {MIN_TEXTS}")
    if len(texts) > MAX_TEXTS:
        texts = [texts[number * len(texts) // MAX_TEXTS] for number in range(MAX_TEXTS)]
    digest = hashlib.sha256(content).hexdigest()
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=str(path), source_sha256=digest))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SetupError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}; see --calibration") from error
    if len(content) > _MAX_BYTES:
        raise SetupError(
            f"{path}: more than {_MAX_BYTES // 1024**2} MiB, the limit of a calibration file; {MAX_TEXTS} texts are used at most"
        )
    return content


def _distinct_texts(path: Path, content: bytes) -> list[str]:
    texts: dict[str, None] = {}
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise SetupError(f"{path}: line {number} is not valid UTF-8") from error
        if text:
            texts[text] = None
    return list(texts)
