"""Limits and joining of sequences, for tasks whose input is many texts. Each text is a sequence."""

from collections.abc import Iterable, Sequence

from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.base import Encoded, check_text

MAX_TEXTS = 1024
# The first text is tokenized again with each of the others. Together they may be as large as the largest input by
# default, because other texts of the model wait meanwhile.
_MAX_BYTES = 1 << 20


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Refuses an empty list, too many texts, and a text that check_text refuses, named by its index."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidInput(name, f"{len(texts)} texts, must be from 1 to {MAX_TEXTS}")
    for index, text in enumerate(texts):
        check_text(f"{name}[{index}]", text)


def check_pairs(first_name: str, first: str, name: str, texts: Sequence[str]) -> None:
    """Refuses pairs of one text with each of many if they are too large together, even if the input itself is small."""
    size_bytes = len(first.encode()) * len(texts) + sum(len(text.encode()) for text in texts)
    if size_bytes > _MAX_BYTES:
        raise InvalidInput(
            f"{first_name} and {name}", f"{len(texts)} pairs of {size_bytes} bytes together, the limit is {_MAX_BYTES}"
        )


def join(parts: Iterable[Encoded]) -> Encoded:
    """The sequences of all parts, in order, as one input."""
    parts = list(parts)
    return Encoded(
        [sequence for part in parts for sequence in part.sequences],
        truncated_tokens=sum(part.truncated_tokens for part in parts),
    )
