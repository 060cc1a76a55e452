"""Texts of an exact number of tokens."""

import itertools
from collections.abc import Awaitable, Callable, Iterator

from neuronpipe.measure.load.texts import builtin_texts

# One token of every tokenizer that knows English.
_FILLER = "the"


async def texts_of_length(count_tokens: Callable[[str], Awaitable[int]], length: int, number: int) -> list[str]:
    """Different English texts of exactly `length` tokens, special ones included; of any length for 0.

    `count_tokens`: of a text, special ones included.
    """
    texts = builtin_texts(0)
    if not length:
        return texts[:number]
    words = itertools.cycle(" ".join(texts).split())
    return [await _text(count_tokens, length, words) for _ in range(number)]


async def _text(count_tokens: Callable[[str], Awaitable[int]], length: int, words: Iterator[str]) -> str:
    taken = list(itertools.islice(words, length))
    # The most words that fit, found by halving; then one token each.
    low, high = 0, len(taken)
    while low < high:
        middle = (low + high + 1) // 2
        if await count_tokens(" ".join(taken[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    text = " ".join(taken[:low]) or _FILLER
    return " ".join([text, *[_FILLER] * (length - await count_tokens(text))])
