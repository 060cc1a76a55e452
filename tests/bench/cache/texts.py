"""As many different texts of a length as are wanted."""

import pydoc_data.topics
import random
from collections.abc import Iterator

# Of the words of Python's help texts in MiniLM's vocabulary (measured).
_TOKENS_PER_WORD = 1.2


def texts(tokens: int, seed: int) -> Iterator[str]:
    """English words in random order, about so many tokens a text; hardly ever the same text twice."""
    topics: dict[str, str] = pydoc_data.topics.topics
    # Not its tables and programs.
    words = [word for name in sorted(topics) for word in topics[name].split() if word.strip(".,:;()").isalpha()]
    chance = random.Random(seed)
    count = max(1, round((tokens - 2) / _TOKENS_PER_WORD))
    while True:
        yield " ".join(chance.choices(words, k=count))
