"""Sample text: for the comparison of an artefact with the original, and for int8 calibration without a file.

Each of the two has English text of the Python manual, and other languages. They share no text: the comparison takes the
manual's first half and every second sentence of languages.py, calibration takes the others.
"""

import dataclasses
import itertools
import pydoc_data.topics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from neuronpipe.compiler.image_modules import encode_image_files
from neuronpipe.compiler.languages import SENTENCES
from neuronpipe.compiler.modules import Batch, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS

Sample: TypeAlias = str | Path  # a text, or the file of an image

BUILT_IN = f"built-in sample text in {len(SENTENCES) + 1} languages"
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
    others = [sentence for sentences in SENTENCES.values() for sentence in sentences[1::2]]
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
    others = [sentences[::2] for sentences in SENTENCES.values()]
    long = [" ".join(sentences) for sentences in others]
    return [*_cut(iter(_manual()[1]), _CALIBRATION), *itertools.chain(*others), *long]


def _manual() -> tuple[list[str], list[str]]:
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    return words[: len(words) // 2], words[len(words) // 2 :]


def _cut(words: Iterable[str], lengths: Iterable[int]) -> list[str]:
    return [" ".join(itertools.islice(words, length)) for length in lengths]
