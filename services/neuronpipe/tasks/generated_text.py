"""Turns generated tokens into text, part by part.

A pure function of the tokens before, the tokens that have not become text yet, and the stop strings. So any process
can do it for any part, and the text is the same however the tokens are divided among calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Decodes tokens without special tokens.
TextOf = Callable[[Sequence[int]], str]

# Tokens before a part that its text may depend on, as a space between words does.
WINDOW_TOKENS = 8
# A token may be a part of a character, which takes up to four, so that no text is known yet. What has so many tokens is
# no character.
_MOST_HELD_TOKENS = 16
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Released:
    """Text that cannot change any more, the number of its tokens, and whether a stop string ended it."""

    text: str
    tokens: int
    is_stopped: bool


def release(
    text_of: TextOf, window: Sequence[int], token_ids: Sequence[int], stop_strings: Sequence[str], *, is_last: bool
) -> Released:
    """The text of `token_ids` as far as it cannot change: whole characters, and no part of a stop string.

    `window`: up to WINDOW_TOKENS tokens before them. The tokens that are left must be passed again, with those that
    follow. `is_last`: none follow. Of a text that holds a stop string, the tokens are those up to the string's end.
    """
    text, ends = "", [(0, 0)]  # after so many tokens, so many characters
    before, done = list(window), 0
    known = text_of(before)
    for count in range(1, len(token_ids) + 1):
        part = token_ids[done:count]
        new = text_of([*before, *part])[len(known) :]
        is_whole = not new.endswith(_REPLACEMENT) or len(part) >= _MOST_HELD_TOKENS
        if not is_whole and not (is_last and count == len(token_ids)):
            continue
        text += new
        before, done = [*before, *part][-WINDOW_TOKENS:], count
        known = text_of(before)
        if new and (found := [at for stop in stop_strings if (at := text.find(stop)) >= 0]):
            return Released(text[: min(found)], count, is_stopped=True)
        ends.append((count, len(text)))
    if is_last:
        return Released(text, len(token_ids), is_stopped=False)
    safe = len(text) - _held(text, stop_strings)
    tokens, length = max((end for end in ends if end[1] <= safe), default=(0, 0))
    return Released(text[:length], tokens, is_stopped=False)


def _held(text: str, stop_strings: Sequence[str]) -> int:
    """The length of the text's end with which a stop string may begin."""
    return max(
        (
            length
            for stop in stop_strings
            for length in range(1, min(len(stop), len(text)) + 1)
            if text.endswith(stop[:length])
        ),
        default=0,
    )
