"""Turns generated tokens into text, part by part.

The text depends only on the tokens before a part, the tokens that are not text yet, and the stop strings. So any
process can convert any part, and the text is the same for every division of the tokens into calls.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from neuronpipe.core.generated import Released

# Number of tokens before a part that its text may depend on, as a space between words does.
WINDOW_TOKENS = 8
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """Converts tokens to text by a tokenizer.

    - `text_of`: the text of tokens, without special tokens.
    - `is_skipped`: whether a token never has a text, as a special token.
    - `byte_ids`: tokens of single bytes, as `ByteFallback` of the library `tokenizers` decodes them: a whole run of
      them is text, or each is U+FFFD if the run is not valid UTF-8. Skipped tokens do not end a run.
    - `own_bytes`: the bytes of a token whose text is always these bytes, or None.
    - `plain_bytes`: the bytes that a token always adds behind another token, or None. Most tokens have such bytes, and
      their text takes a tenth of the time of `text_of`.
    - `with_special`: converts special tokens as well.
    """

    text_of: Callable[[Sequence[int]], str]
    is_skipped: Callable[[int], bool] = field(default=lambda _: False)
    byte_ids: frozenset[int] = frozenset()
    own_bytes: Callable[[int], bytes | None] = field(default=lambda _: None)
    plain_bytes: Callable[[int], bytes | None] = field(default=lambda _: None)
    with_special: "Detokenizer | None" = None

    def bytes_of(self, token_id: int, before: Sequence[int]) -> bytes:
        """Returns the text of a token behind others, in UTF-8; empty for a skipped token."""
        if self.is_skipped(token_id):
            return b""
        if (fixed_bytes := self.own_bytes(token_id)) is not None:
            return fixed_bytes
        text_before = self.text_of(before) if before else ""
        return self.text_of([*before, token_id])[len(text_before) :].encode()


def release(
    detokenizer: Detokenizer,
    window: Sequence[int],
    token_ids: Sequence[int],
    stop_strings: Sequence[str],
    *,
    is_last: bool,
) -> Released:
    """Converts `token_ids` to text as far as the text cannot change: whole characters, whole runs of byte tokens, and
    no part of a stop string.

    `window`: up to WINDOW_TOKENS tokens before them. The caller passes the tokens that are left again, with the tokens
    that follow. `is_last`: no token follows. If a stop string ends the text, its tokens end with that string; a run of
    byte tokens is not divided.
    """
    texts = _plain_texts(detokenizer, window, token_ids)
    if texts is not None and not stop_strings:  # the usual case
        return Released("".join(texts), len(token_ids))
    parts: Iterable[tuple[int, str, bool]]
    if texts is None:
        parts = _parts(detokenizer, window, token_ids, is_last=is_last)
    else:
        parts = ((count, new, True) for count, new in enumerate(texts, 1))
    text, ends = "", [(0, 0)]  # number of tokens, and of the characters up to their end
    for count, new, is_whole in parts:
        so_far = text + new
        if new and (found := [(at, stop) for stop in stop_strings if (at := so_far.find(stop)) >= 0]):
            end, stop_string = min(found, key=itemgetter(0))
            return Released(so_far[:end], count, stop_string)
        if is_whole:
            text = so_far
            ends.append((count, len(text)))
    if is_last:
        return Released(text, len(token_ids))
    safe = len(text) - _held(text, stop_strings)
    tokens, length = max((end for end in ends if end[1] <= safe), default=(0, 0))
    return Released(text[:length], tokens)


def _plain_texts(detokenizer: Detokenizer, window: Sequence[int], token_ids: Sequence[int]) -> list[str] | None:
    """Returns the text of each token, if every token has bytes of its own, and these are whole characters."""
    plain_bytes, texts = detokenizer.plain_bytes, list[str]()
    # Decoders treat the first token of a text differently, so a token with a text must come before.
    if not any(map(plain_bytes, window)):
        return None
    for token_id in token_ids:
        if (piece := plain_bytes(token_id)) is None:
            return None
        try:
            texts.append(piece.decode())
        except UnicodeDecodeError:
            return None
    return texts


def _parts(
    detokenizer: Detokenizer, window: Sequence[int], token_ids: Sequence[int], *, is_last: bool
) -> Iterator[tuple[int, str, bool]]:
    """Yields for each part the number of tokens up to its end, its text, and whether its text is final.

    A part with a final text is as small as possible. Parts that end within a character precede it, with their text up
    to that character, and False. Their text matters because a token may contain a stop string and the start of a
    character.
    """
    ends = _possible_ends(detokenizer, token_ids, is_last=is_last)
    before, done = _before(detokenizer, window, token_ids), 0
    text_before: str | None = None  # the text of `before`
    open_parts: list[tuple[int, str]] = []  # parts that begin at `done`, and may end within a character
    place = 0
    while place < len(ends):
        count = ends[place]
        if text_before is None:
            text_before = detokenizer.text_of(before)
        new = detokenizer.text_of([*before, *token_ids[done:count]])[len(text_before) :]
        if token_ids[count - 1] in detokenizer.byte_ids or not new.endswith(_REPLACEMENT):
            settled: tuple[int, str] | None = count, new
        else:
            # Only the last U+FFFD can be an incomplete character. Earlier U+FFFD stay, because their bytes are no
            # character.
            settled = max((part for part in open_parts if new[:-1].startswith(part[1])), default=None)
            if settled is None and is_last and count == ends[-1]:
                settled = count, new
        if settled is None:
            yield count, new[:-1], False
            open_parts.append((count, new))
            place += 1
            continue
        yield *settled, True
        before, done = [*before, *token_ids[done : settled[0]]][-WINDOW_TOKENS:], settled[0]
        text_before = None
        place, open_parts = bisect_right(ends, done), []


def _possible_ends(detokenizer: Detokenizer, token_ids: Sequence[int], *, is_last: bool) -> list[int]:
    """Returns the numbers of tokens after which a part may end.

    No part ends within a run of bytes, which may change as a whole, nor after skipped tokens. So the window of the next
    part has a text, and shows that the part is not the first. A window may begin within a run. That run has ended, so
    its text does not depend on the tokens that follow.
    """
    written = [count for count, token_id in enumerate(token_ids, 1) if not detokenizer.is_skipped(token_id)]
    is_byte = [token_ids[count - 1] in detokenizer.byte_ids for count in written]
    ends = [count for count, both in zip(written, pairwise(is_byte), strict=False) if not all(both)]
    return ends + [count for count in written[-1:] if is_last or not is_byte[-1]]


def _before(detokenizer: Detokenizer, window: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """Returns the window, without byte tokens at its end if the tokens begin with byte tokens.

    The bytes of a prompt are a run of their own, such as Llama's line break, which a text must not change.
    """
    first = next((token_id for token_id in token_ids if not detokenizer.is_skipped(token_id)), None)
    if first not in detokenizer.byte_ids:
        return list(window)
    is_other = [not detokenizer.is_skipped(token_id) and token_id not in detokenizer.byte_ids for token_id in window]
    return list(window[: max((count for count, other in enumerate(is_other, 1) if other), default=0)])


def _held(text: str, stop_strings: Sequence[str]) -> int:
    """Returns the length of the longest end of the text with which a stop string may begin."""
    return max(
        (length for stop in stop_strings for length in range(len(stop) + 1) if text.endswith(stop[:length])), default=0
    )
