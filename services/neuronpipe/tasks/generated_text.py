"""Turns generated tokens into text, part by part.

A pure function of the tokens before, the tokens that have not become text yet, and the stop strings. So any process
can do it for any part, and the text is the same however the tokens are divided among calls.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Tokens before a part that its text may depend on, as a space between words does.
WINDOW_TOKENS = 8
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """A tokenizer's text of tokens.

    `text_of`: the text of tokens, without special tokens. `is_skipped`: whether a token has no text in any place, as a
    special one. `byte_ids`: tokens of single bytes, as `ByteFallback` of the library `tokenizers` decodes them: a whole
    run of them is text, or each is U+FFFD if the run is not valid UTF-8. Skipped tokens do not end a run. `own_bytes`:
    of a token whose text is bytes, whatever stands before it, these; else None.
    """

    text_of: Callable[[Sequence[int]], str]
    is_skipped: Callable[[int], bool] = field(default=lambda _: False)
    byte_ids: frozenset[int] = frozenset()
    own_bytes: Callable[[int], bytes | None] = field(default=lambda _: None)

    def bytes_of(self, token_id: int, before: Sequence[int]) -> bytes:
        """The text of a token behind others, in UTF-8; empty for one that is skipped."""
        if self.is_skipped(token_id):
            return b""
        if (own := self.own_bytes(token_id)) is not None:
            return own
        known = self.text_of(before) if before else ""
        return self.text_of([*before, token_id])[len(known) :].encode()


@dataclass(frozen=True, slots=True)
class Released:
    """Text that cannot change any more, the number of its tokens, and whether a stop string ended it."""

    text: str
    tokens: int
    is_stopped: bool


def release(
    detokenizer: Detokenizer,
    window: Sequence[int],
    token_ids: Sequence[int],
    stop_strings: Sequence[str],
    *,
    is_last: bool,
) -> Released:
    """The text of `token_ids` as far as it cannot change: whole characters, whole runs of byte tokens, and no part of a
    stop string.

    `window`: up to WINDOW_TOKENS tokens before them. The tokens that are left must be passed again, with those that
    follow. `is_last`: none follow. Of a text that holds a stop string, the tokens are those up to the string's end; a
    run of byte tokens is not divided.
    """
    text, ends = "", [(0, 0)]  # after so many tokens, so many characters
    for count, new, is_whole in _parts(detokenizer, window, token_ids, is_last=is_last):
        so_far = text + new
        if new and (found := [at for stop in stop_strings if (at := so_far.find(stop)) >= 0]):
            return Released(so_far[: min(found)], count, is_stopped=True)
        if is_whole:
            text = so_far
            ends.append((count, len(text)))
    if is_last:
        return Released(text, len(token_ids), is_stopped=False)
    safe = len(text) - _held(text, stop_strings)
    tokens, length = max((end for end in ends if end[1] <= safe), default=(0, 0))
    return Released(text[:length], tokens, is_stopped=False)


def _parts(
    detokenizer: Detokenizer, window: Sequence[int], token_ids: Sequence[int], *, is_last: bool
) -> Iterator[tuple[int, str, bool]]:
    """The smallest parts whose texts cannot change: the number of tokens up to the end of each, its text, and True.

    Before them, with False, those that end within a character, with their text up to it: a token may have a stop string
    and the begin of a character.
    """
    ends = _possible_ends(detokenizer, token_ids, is_last=is_last)
    before, done = _before(detokenizer, window, token_ids), 0
    known: str | None = None  # the text of `before`
    open_parts: list[tuple[int, str]] = []  # those that begin at `done`, and may end within a character
    place = 0
    while place < len(ends):
        count = ends[place]
        if known is None:
            known = detokenizer.text_of(before)
        new = detokenizer.text_of([*before, *token_ids[done:count]])[len(known) :]
        if token_ids[count - 1] in detokenizer.byte_ids or not new.endswith(_REPLACEMENT):
            settled: tuple[int, str] | None = count, new
        else:
            # A character that is not whole yet is the last U+FFFD. Those before it stay: bytes that are no character.
            settled = _longest_begin(open_parts, new[:-1])
            if settled is None and is_last and count == ends[-1]:
                settled = count, new
        if settled is None:
            yield count, new[:-1], False
            open_parts.append((count, new))
            place += 1
            continue
        yield *settled, True
        before, done = [*before, *token_ids[done : settled[0]]][-WINDOW_TOKENS:], settled[0]
        known = None
        place, open_parts = bisect_right(ends, done), []


def _possible_ends(detokenizer: Detokenizer, token_ids: Sequence[int], *, is_last: bool) -> list[int]:
    """The numbers of tokens after which a part may end.

    Not within a run of bytes, which may change as a whole, nor after skipped tokens. So the window of the next part
    has a text, which tells the part that it is not the first. A window may begin within a run: that has ended, so its
    text is the same with and without what follows.
    """
    written = [count for count, token_id in enumerate(token_ids, 1) if not detokenizer.is_skipped(token_id)]
    is_byte = [token_ids[count - 1] in detokenizer.byte_ids for count in written]
    ends = [count for count, both in zip(written, pairwise(is_byte), strict=False) if not all(both)]
    return ends + [count for count in written[-1:] if is_last or not is_byte[-1]]


def _before(detokenizer: Detokenizer, window: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The window, without the bytes that end it if the tokens begin with bytes: those of a prompt are a run of its own,
    as a line break of Llama is, which a text must not change.
    """
    first = next((token_id for token_id in token_ids if not detokenizer.is_skipped(token_id)), None)
    if first not in detokenizer.byte_ids:
        return list(window)
    is_other = [not detokenizer.is_skipped(one) and one not in detokenizer.byte_ids for one in window]
    return list(window[: max((count for count, other in enumerate(is_other, 1) if other), default=0)])


def _longest_begin(parts: Sequence[tuple[int, str]], text: str) -> tuple[int, str] | None:
    """The longest of the parts with whose text a text begins."""
    return max((part for part in parts if text.startswith(part[1])), default=None)


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
