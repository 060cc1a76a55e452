"""Where a text's tokens are, as TEI counts."""

from collections.abc import Sequence
from itertools import accumulate

from neuronpipe.api.v1.tasks_pb2 import Token

_NO_PLACE = (None, None)


def token_places(text: str, tokens: Sequence[Token]) -> list[tuple[int, int] | tuple[None, None]]:
    """The start and the end of each token in the text's UTF-8, in bytes; None for a special token, which has no place.

    TEI takes the offsets of the Rust library as they are, which counts bytes (core/src/tokenization.rs, into_tokens).
    """
    if text.isascii():
        return [_NO_PLACE if token.is_special else (token.start, token.end) for token in tokens]
    before = [0, *accumulate(len(char.encode()) for char in text)]
    return [_NO_PLACE if token.is_special else (before[token.start], before[token.end]) for token in tokens]
