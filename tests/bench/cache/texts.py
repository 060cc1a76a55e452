"""As many different texts of a length as are wanted."""

import pydoc_data.topics
import random
from collections.abc import Iterator

# Of Python's help texts in MiniLM's vocabulary, signs included.
_TOKENS_PER_WORD = 1.55


def texts(tokens: int, seed: int) -> Iterator[str]:
    """English words in random order, about so many tokens a text; hardly ever the same text twice."""
    topics: dict[str, str] = pydoc_data.topics.topics
    words = " ".join(topics[name] for name in sorted(topics)).split()
    chance = random.Random(seed)
    count = max(1, round(tokens / _TOKENS_PER_WORD))
    while True:
        yield " ".join(chance.choices(words, k=count))
