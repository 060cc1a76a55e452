"""Sample text: for the comparison of an artefact with the original, and for int8 calibration.

Each of the two has English text of the Python manual, and other languages. They share no text: the comparison takes the
manual's first half and every second of `sentences`, calibration takes the others, or the texts of a file, or the
images of a folder.
"""

import dataclasses
import functools
import itertools
import json
import pydoc_data.topics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from neuronpipe.bundles.manifest import Calibration, file_sha256
from neuronpipe.compiler.images import encode_image_files
from neuronpipe.compiler.modules import Batch, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.core.lines import read_lines

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
