"""What tasks share whose input is many texts, each of them a sequence: the limits, and how the sequences become one input."""

from collections.abc import Iterable, Sequence

from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.base import Encoded, check_text

MAX_TEXTS = 1024
# What stands before every text is tokenized again with each: together no more than the largest input of default settings, as nobody else's
# text is tokenized meanwhile.
_MAX_BYTES = 1 << 20


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Refuses no texts, too many, and one that check_text refuses, by its number."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidInput(name, f"{len(texts)} texts, must be from 1 to {MAX_TEXTS}")
    for index, text in enumerate(texts):
        check_text(f"{name}[{index}]", text)


def check_pairs(first_name: str, first: str, name: str, texts: Sequence[str]) -> None:
    """Refuses pairs of one text with each of many that are too large together, though the input is small."""
    size_bytes = len(first.encode()) * len(texts) + sum(len(text.encode()) for text in texts)
    if size_bytes > _MAX_BYTES:
        raise InvalidInput(f"{first_name} and {name}", f"{len(texts)} pairs of {size_bytes} bytes together, the limit is {_MAX_BYTES}")


def join(parts: Iterable[Encoded]) -> Encoded:
    """The sequences of all parts, in order, as one input."""
    parts = list(parts)
    return Encoded(
        [sequence for part in parts for sequence in part.sequences], truncated_tokens=sum(part.truncated_tokens for part in parts)
    )
