"""Guesses the next tokens of a text, so that a step computes several of them: speculative decoding by prompt lookup.

A text that copies (a summary, a corrected or translated text, code) repeats tokens that it has read. So a draft of its
next tokens consists of the tokens that followed its last tokens earlier, in the prompt, the source or the text. The
planner adds the draft behind the text's last token in the same step. `steps.py` chooses the token after each draft
token as always, and stops at the first that differs from the draft. So the text stays the same, and a step brings up to
one token more than the draft has. Keys and values of refused tokens lie behind `computed`, and are overwritten.

Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers' prompt_lookup_num_tokens.
"""

from collections.abc import Sequence

# Longer n-grams first: they are rarer, and the tokens that followed them more often follow again.
_NGRAM_SIZES = (3, 2)
# Limit of known places in a long prompt, which are its last places. A place takes 240 bytes, and holding the planner's
# lock for 2 µs.
_MOST_PLACES = 8192
# Longest pause in steps. If the drafts of 8 texts were wrong in every step, a token took 1.35 times as long (measured
# 2026-11-26, CPU with AVX-512).
_LONGEST_PAUSE = 7


class PromptLookup:
    """The drafts of one text.

    `source_ids`: the text that an encoder has read. `max_draft_tokens`: limit of a draft's tokens.
    """

    def __init__(self, source_ids: Sequence[int], max_draft_tokens: int) -> None:
        self._token_ids = [*source_ids]
        self._source_tokens = len(source_ids)
        # The place behind each n-gram of 3 or 2 tokens, the last place if there are several.
        self._places: dict[tuple[int, ...], int] = {}
        self._found = 0
        self._most = self._size = max_draft_tokens
        # Steps of the pause after the last wrong draft, and the steps of it that are left.
        self._pause = self._pause_left = 0

    def draft(self, token_ids: Sequence[int], room: int) -> list[int]:
        """Returns at most `room` tokens that may follow `token_ids`, the prompt and all tokens so far."""
        if self._pause_left:
            self._pause_left -= 1
            return []
        return self.find(token_ids, min(self._size, room))

    def find(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Finds up to `count` tokens that followed the last tokens of `token_ids` earlier."""
        seen_ids = self._token_ids
        seen_ids += token_ids[len(seen_ids) - self._source_tokens :]
        for place in range(max(self._found, len(seen_ids) - _MOST_PLACES), len(seen_ids)):
            for size in _NGRAM_SIZES:
                if place >= size:
                    self._places[tuple(seen_ids[place - size : place])] = place
        self._found = len(seen_ids)
        for size in _NGRAM_SIZES:
            if place := self._places.get(tuple(seen_ids[-size:]), 0):
                return seen_ids[place : place + count]
        return []

    def note(self, accepted: int) -> None:
        """Notes that `accepted` tokens of a draft were right. The next draft has one token more.

        After wrong drafts the next draft comes later and later, so that drafts cost little if a text does not copy.
        """
        self._size = min(self._most, accepted + 1)
        self._pause = self._pause_left = 0 if accepted else min(_LONGEST_PAUSE, 2 * self._pause + 1)
