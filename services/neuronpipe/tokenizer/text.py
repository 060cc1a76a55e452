"""A model's tokenizer.json as the tasks need it. The only file that knows the library `tokenizers`."""

import json
import threading
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Encoding, Tokenizer

from neuronpipe.tasks.base import EncodedText, LocatedText, Side, TokenIds, Window
from neuronpipe.tokenizer.words import WordRule

# Of the library, whose encodings may change with it.
LIBRARY_VERSION: str = tokenizers.__version__


class JsonTokenizer:
    """The TextTokenizer (see tasks/base.py) of a tokenizer.json.

    Truncation is a state of the library's object, so one lock guards every call; a process that wants more throughput runs the
    service more often (tokenizing in threads of one process gains nothing: design.md, section 6).
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # What a caller writes is text, whatever it spells; a mask that is allowed is no special token in the file (compiler/tokenizers.py).
        self._tokenizer.encode_special_tokens = True
        self._words = WordRule.of_model(json.loads(path.read_text(encoding="utf-8"))["model"])
        self._lock = threading.Lock()

    def token_id(self, token: str) -> int | None:
        """See TextTokenizer."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def count(self, text: str) -> int:
        """See TextTokenizer."""
        with self._lock:
            return len(self._encode(text, add_special_tokens=False))

    def special_tokens(self, *, pair: bool) -> int:
        """See TextTokenizer."""
        return self._tokenizer.num_special_tokens_to_add(pair)

    def encode(self, text: str, text_pair: str | None = None) -> EncodedText:
        """See TextTokenizer."""
        with self._lock:
            encoding = self._encode(text, text_pair)
        return EncodedText(_array(encoding.ids), _array(encoding.type_ids))

    def encode_truncated(self, text: str, text_pair: str | None, *, max_tokens: int, side: Side, only_first: bool = False) -> EncodedText:
        """See TextTokenizer."""
        whole_tokens = len(self.encode(text, text_pair).token_ids)
        strategy = "only_first" if only_first else "longest_first"
        encoding = self._encode_in_limit(text, text_pair, max_tokens, strategy=strategy, direction=side)
        return EncodedText(_array(encoding.ids), _array(encoding.type_ids), whole_tokens - len(encoding.ids))

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        """See TextTokenizer."""
        encoding = self._encode_in_limit(first, second, max_tokens, strategy="only_second", stride=overlap_tokens, with_offsets=True)
        return [_window(part) for part in (encoding, *encoding.overflowing)]

    def locate(self, text: str, *, max_tokens: int | None = None, side: Side = "right", overlap_tokens: int = 0) -> list[LocatedText]:
        """See TextTokenizer."""
        if max_tokens is None:
            with self._lock:
                encoding = self._encode(text, with_offsets=True)
        else:
            encoding = self._encode_in_limit(
                text, None, max_tokens, strategy="longest_first", stride=overlap_tokens, direction=side, with_offsets=True
            )
        return [self._located(part, text) for part in (encoding, *encoding.overflowing)]

    def _located(self, encoding: Encoding, text: str) -> LocatedText:
        token_ids = _array(encoding.ids)
        offsets = np.array(encoding.offsets, np.int32).reshape(len(token_ids), 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        continues_word = self._words.continues_word(text, token_ids, encoding.tokens, starts, ends)
        is_special = np.array(encoding.special_tokens_mask, bool)
        return LocatedText(
            token_ids,
            _array(encoding.type_ids),
            char_start=np.where(is_special, np.int32(-1), starts),
            char_end=np.where(is_special, np.int32(-1), ends),
            continues_word=np.where(is_special, 0, continues_word).astype(np.int32),
        )

    def _encode(self, text: str, text_pair: str | None = None, *, add_special_tokens: bool = True, with_offsets: bool = False) -> Encoding:
        # A batch of one, since the library's `encode` keeps the interpreter's lock: a text of 1 MB would stop every thread for a second.
        inputs = [text] if text_pair is None else [(text, text_pair)]
        # Without offsets it takes a sixth less time.
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        (encoding,) = encode(inputs, add_special_tokens=add_special_tokens)
        return encoding

    def _encode_in_limit(
        self,
        first: str,
        second: str | None,
        max_tokens: int,
        *,
        strategy: str,
        stride: int = 0,
        direction: Side = "right",
        with_offsets: bool = False,
    ) -> Encoding:
        with self._lock:
            self._tokenizer.enable_truncation(max_tokens, stride=stride, strategy=strategy, direction=direction)
            try:
                return self._encode(first, second, with_offsets=with_offsets)
            finally:
                self._tokenizer.no_truncation()


def _array(numbers: list[int]) -> TokenIds:
    return np.array(numbers, dtype=np.int32)


def _window(encoding: Encoding) -> Window:
    tokens = len(encoding.ids)
    char_start, char_end = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
    is_second = np.array([sequence == 1 for sequence in encoding.sequence_ids], bool)
    offsets = np.array(encoding.offsets, np.int32).reshape(tokens, 2)
    char_start[is_second], char_end[is_second] = offsets[is_second].T
    # A token that is part of a word gets the word's range. Words of the second text are numbered from 0 on, in order.
    word_ids = encoding.word_ids
    by_word: dict[int, list[int]] = {}
    for token in np.flatnonzero(is_second).tolist():
        word = word_ids[token]
        if word is not None:
            by_word.setdefault(word, []).append(token)
    for members in by_word.values():
        char_start[members] = char_start[members[0]]
        char_end[members] = char_end[members[-1]]
    return Window(_array(encoding.ids), _array(encoding.type_ids), char_start=char_start, char_end=char_end)
