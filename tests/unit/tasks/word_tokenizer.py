"""A TextTokenizer small enough to follow by hand: a word is a token."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.base import (
    Encoded,
    EncodedText,
    LocatedText,
    Side,
    Task,
    TextTokenizer,
    TextTokens,
    TokenIds,
    Window,
)

CLS, SEP = 1, 2
_FIRST_WORD_ID = 10


class WordTokenizer:
    """One text is [CLS] words [SEP], a pair [CLS] words [SEP] words [SEP] with the second text of type 1.

    Words are numbered in the order in which this tokenizer first meets them. Truncation keeps the special tokens.
    """

    def __init__(self, *known: str) -> None:
        self._ids: dict[str, int] = {}
        for word in known:
            self._id(word)

    def token_id(self, token: str) -> int | None:
        """See TextTokenizer."""
        return self._ids.get(token)

    def count(self, text: str) -> int:
        """See TextTokenizer."""
        return len(text.split())

    def tokens(self, text: str, *, special_tokens: bool, max_tokens: float = math.inf) -> TextTokens:
        """See TextTokenizer."""
        located, names = self.locate(text), ["[CLS]", *text.split(), "[SEP]"]
        kept = slice(None) if special_tokens else slice(1, -1)
        if len(names[kept]) > max_tokens:
            raise InvalidInput("text", f"{len(names[kept])} tokens, the limit of tokenization is {max_tokens}")
        return TextTokens(located.token_ids[kept], names[kept], located.char_start[kept], located.char_end[kept])

    def text_of(self, token_ids: Iterable[int], *, special_tokens: bool) -> str:
        """See TextTokenizer."""
        words = {CLS: "[CLS]", SEP: "[SEP]"} if special_tokens else {}
        words |= {token_id: word for word, token_id in self._ids.items()}
        return " ".join(words[id] for id in token_ids if id in words)

    def special_tokens(self, *, pair: bool) -> int:
        """See TextTokenizer."""
        return 3 if pair else 2

    def encode_words(self, words: Sequence[str]) -> tuple[TokenIds, TokenIds]:
        """See TextTokenizer. A word may have spaces, and thus several tokens."""
        parts = [(self._id(part), index) for index, word in enumerate(words) for part in word.split()]
        token_ids, indices = zip(*parts, strict=True) if parts else ((), ())
        return np.array(token_ids, np.int32), np.array(indices, np.int32)

    def encode(self, text: str, text_pair: str | None = None, *, prompt: str = "") -> EncodedText:
        """See TextTokenizer."""
        return self._encoded((prompt + text).split(), None if text_pair is None else text_pair.split())

    def encode_each(self, texts: Sequence[str], *, prompt: str = "") -> Iterator[EncodedText]:
        """See TextTokenizer."""
        return (self.encode(text, prompt=prompt) for text in texts)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> EncodedText:
        """See TextTokenizer. The template has "role: content" for each message."""
        return self.encode(" ".join(f"{message['role']}: {message['content']}" for message in messages))

    def encode_truncated(
        self,
        text: str,
        text_pair: str | None,
        *,
        max_tokens: int,
        side: Side,
        only_first: bool = False,
        prompt: str = "",
    ) -> EncodedText:
        """See TextTokenizer."""
        texts = [part.split() for part in (prompt + text, text_pair) if part is not None]
        dropped = 0
        while sum(map(len, texts)) + self.special_tokens(pair=text_pair is not None) > max_tokens:
            if only_first and len(texts[0]) == 1:
                break
            (texts[0] if only_first else max(texts, key=len)).pop(0 if side == "left" else -1)
            dropped += 1
        return self._encoded(texts[0], texts[1] if text_pair is not None else None, dropped)

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """See TextTokenizer."""
        words = _words(second)
        room = max_tokens - self.count(first) - 3
        windows = []
        for begin in range(0, max(len(words) - overlap_tokens, 1), room - overlap_tokens):
            part = words[begin : begin + room]
            encoded = self._encoded(first.split(), [word for word, _, _ in part])
            outside = [-1] * (self.count(first) + 2)
            windows.append(
                Window(
                    encoded.token_ids,
                    encoded.token_type_ids,
                    char_start=np.array([*outside, *(start for _, start, _ in part), -1], np.int32),
                    char_end=np.array([*outside, *(end for _, _, end in part), -1], np.int32),
                )
            )
        return windows

    def locate(self, text: str) -> LocatedText:
        """See TextTokenizer. A word that begins with a hyphen continues the one before it."""
        return self._located(_words(text))

    def locate_windows(self, text: str, *, max_tokens: int, overlap_tokens: int) -> list[LocatedText]:
        """See TextTokenizer."""
        words, room = _words(text), max_tokens - 2
        begins = range(0, max(len(words) - overlap_tokens, 1), room - overlap_tokens)
        return [self._located(words[begin : begin + room]) for begin in begins]

    def _located(self, part: list[tuple[str, int, int]]) -> LocatedText:
        encoded = self._encoded([word for word, _, _ in part], None)
        return LocatedText(
            encoded.token_ids,
            encoded.token_type_ids,
            char_start=np.array([-1, *(start for _, start, _ in part), -1], np.int32),
            char_end=np.array([-1, *(end for _, _, end in part), -1], np.int32),
            continues_word=np.array([0, *(word.startswith("-") for word, _, _ in part), 0], np.int32),
        )

    def ids(self, words: str) -> list[int]:
        """The ids of words."""
        return [self._id(word) for word in words.split()]

    def _encoded(self, words: list[str], second: list[str] | None, dropped: int = 0) -> EncodedText:
        ids = [CLS, *map(self._id, words), SEP]
        types = [0] * len(ids)
        if second is not None:
            ids += [*map(self._id, second), SEP]
            types += [1] * (len(second) + 1)
        return EncodedText(np.array(ids, np.int32), np.array(types, np.int32), dropped)

    def _id(self, word: str) -> int:
        if word == "[CLS]":  # as real tokenizers do with the text of a special token
            return CLS
        return self._ids.setdefault(word, _FIRST_WORD_ID + len(self._ids))


def _words(text: str) -> list[tuple[str, int, int]]:
    return [(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+", text)]


def encode_checked(task: Task, input: Any, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """An input's encoding, as the tokenizer service makes it."""
    task.check(input, model)
    return task.encode(input, tokenizer, model)
