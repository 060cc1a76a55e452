"""Guesses the next tokens of a text, so that a step computes several of them: speculative decoding by prompt lookup.

A text that copies (a summary, a corrected or translated text, code) writes again what it has read. So a draft of its
next tokens is what followed its last tokens where they were before, in the prompt, the source or the text. The planner
has the draft computed behind the text's last token, in the same step. `steps.py` chooses the token after each of these
tokens as it always does, and stops where it is not that of the draft. So the text is the same, and a step brings up to
as many tokens as the draft has, and one. What the blocks hold of refused tokens is behind `computed`, and overwritten.

Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers' prompt_lookup_num_tokens.
"""

from collections.abc import Sequence

# Longer ones first: they are rarer, and what followed them more often follows again.
_NGRAM_SIZES = (3, 2)
# Of a long prompt, the last places are known: each takes 2 µs, in which the planner's lock is held, and 240 bytes.
_MOST_PLACES = 8192
# Of 8 texts with wrong drafts in every step a token took 1.35 times as long (measured 2026-11-26, CPU with AVX-512).
_LONGEST_PAUSE = 7


class PromptLookup:
    """The drafts of one text. `source_ids`: what a model with an encoder has read; `most`: the tokens of a draft."""

    def __init__(self, source_ids: Sequence[int], most: int) -> None:
        self._token_ids = [*source_ids]
        self._source_tokens = len(source_ids)
        # The place behind each run of 3 or 2 tokens, the last one of several.
        self._places: dict[tuple[int, ...], int] = {}
        self._found = 0
        self._most = self._size = most
        # In steps: after the last draft that was wrong, and how much of it is left.
        self._pause = self._pause_left = 0

    def draft(self, token_ids: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that may follow `token_ids`, the prompt and all tokens so far."""
        if self._pause_left:
            self._pause_left -= 1
            return []
        return self.find(token_ids, min(self._size, room))

    def find(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that followed the last ones of `token_ids` before, or fewer."""
        known = self._token_ids
        known += token_ids[len(known) - self._source_tokens :]
        for place in range(max(self._found, len(known) - _MOST_PLACES), len(known)):
            for size in _NGRAM_SIZES:
                if place >= size:
                    self._places[tuple(known[place - size : place])] = place
        self._found = len(known)
        for size in _NGRAM_SIZES:
            if place := self._places.get(tuple(known[-size:]), 0):
                return known[place : place + count]
        return []

    def note(self, accepted: int) -> None:
        """`accepted` tokens of a draft were right. The next draft has one more; after wrong ones it comes later and
        later, so that they cost little where a text does not copy.
        """
        self._size = min(self._most, accepted + 1)
        self._pause = self._pause_left = 0 if accepted else min(_LONGEST_PAUSE, 2 * self._pause + 1)
