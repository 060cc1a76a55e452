"""The tokenizer of a tokenizer.json. The only file of the stage that imports the library `tokenizers`."""

import json
import math
import re
import threading
import unicodedata
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer
from tokenizers.normalizers import Normalizer, Replace, Sequence
from tokenizers.processors import TemplateProcessing

from neuronpipe.core.errors import InvalidInput
from neuronpipe.stages.tokenizer.chat import ChatTemplate
from neuronpipe.tasks.base import EncodedText, LocatedText, Side, TextTokens, TokenIds, Window


@dataclass(frozen=True, slots=True)
class WordRule:
    """The rule by which a model's tokens continue a word.

    Some tokenizers mark continuations (WordPiece: "##ing"): such a token is longer than its text. With all others
    (byte-level BPE, SentencePiece) a token continues a word unless it begins with a space, or a space precedes it. An
    unknown token is a word. Source: transformers 5, pipelines/token_classification.py, gather_pre_entities.
    """

    has_prefix: bool
    unknown_id: int | None

    @classmethod
    def of_model(cls, model: Mapping[str, Any]) -> "WordRule":
        """Reads the rule in tokenizer.json's "model"."""
        unknown_id = model.get("unk_id")
        if unknown_id is None and isinstance(model.get("vocab"), Mapping):
            unknown_id = model["vocab"].get(model.get("unk_token"))
        return cls(bool(model.get("continuing_subword_prefix")), unknown_id)

    def continues_word(
        self, text: str, token_ids: TokenIds, tokens: abc.Sequence[str], starts: TokenIds, ends: TokenIds
    ) -> NDArray[np.bool_]:
        """Returns whether each token continues a word. `starts` and `ends`: its offsets in the text, in code points."""
        if self.has_prefix:
            lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
            continues: NDArray[np.bool_] = lengths != ends - starts
        else:
            # A token without characters may be behind the end of the text, where there is no space.
            is_space = np.append(np.frombuffer(text.encode("utf-32-le"), "<u4") == ord(" "), False)
            continues = (starts > 0) & ~is_space[starts] & ~is_space[starts - 1]
        return continues if self.unknown_id is None else continues & (token_ids != self.unknown_id)


# The version of the library, with which encodings may change.
LIBRARY_VERSION: str = tokenizers.__version__
# A text with more characters takes so long to tokenize that no other text should wait for it.
LONG_TEXT = 64 << 10
# Up to this length, no normalization makes a text too long, even by 18 characters for each (U+FDFA by NFKC).
_LONG_IF_GROWN = LONG_TEXT // 4
# Characters per counted piece; a piece takes 0.1 ms.
_PIECE = 64 << 10
# Maximum number of characters that a normalization may make of a text with fewer bytes. The library takes 150 to 450
# bytes for each character that becomes a token (measured 2026-11-28).
_MOST_GROWN = 1 << 20


class JsonTokenizer:
    """The TextTokenizer (see tasks/base.py) of a tokenizer.json, for several threads at once.

    Several threads do not increase the throughput, but a short text does not wait for a long text.
    """

    def __init__(
        self,
        written: bytes,
        chat_template: str = "",
        template_variables: Mapping[str, str] | None = None,
        *,
        cuts_windows: bool = False,
        reads_special_tokens: bool = False,
    ) -> None:
        """`written`: the file's content. `template_variables`: special tokens by their names in the template.

        `cuts_windows`: most texts will be cut into windows, so the tokenizer for windows is loaded now.
        `reads_special_tokens`: special tokens that a text spells are special, as in transformers. In chat messages
        they are always plain text.
        """
        content = json.loads(written)
        counts_deleted = "precompiled_charsmap" in json.dumps(content["normalizer"])
        load = partial(_load, written, counts_deleted=counts_deleted, reads_special_tokens=reads_special_tokens)
        # Calls share these objects, and never change them. An allowed mask is not a special token in the file
        # (compiler/tokenizers.py).
        self._tokenizer = self._chat_tokenizer = load()
        if chat_template and reads_special_tokens:
            self._chat_tokenizer = load(reads_special_tokens=False)
        self._load_trusting = partial(load, reads_special_tokens=True, in_normalized=False)
        self._reads_special_tokens = reads_special_tokens
        self._short_windows, self._long_windows = _TextWindows(load), _TextWindows(load)
        # Loading takes up to a second. Otherwise the first request would hold up all other requests for this time.
        if cuts_windows:
            self._short_windows.load()
        if chat_template:
            self._trusting_tokenizer  # noqa: B018 (a cached property)
        self._words = WordRule.of_model(content["model"])
        written_special = [token["content"] for token in content["added_tokens"] if token["special"]]
        special = [token.removeprefix("\0") for token in written_special]
        self._special = _any_of(special)
        self._hidden = _any_of(token for token in written_special if token.startswith("\0"))
        self._chat = ChatTemplate(chat_template, template_variables or {}, special)

    @cached_property
    def _trusting_tokenizer(self) -> Tokenizer:
        """The tokenizer for the model's own words, whose special tokens are special. Most models do not need it."""
        return self._load_trusting()

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def count(self, text: str) -> int:
        return len(_encode(self._tokenizer, text, add_special_tokens=False))

    def tokens(self, text: str, *, special_tokens: bool, max_tokens: float = math.inf) -> TextTokens:
        encoding = _encode(self._tokenizer, text, add_special_tokens=special_tokens, with_offsets=True)
        if (count := len(encoding)) > max_tokens:  # checked before arrays are made
            del encoding  # the error's traceback would keep its hundreds of megabytes beside the next long text
            raise InvalidInput("text", f"{count} tokens, the limit of tokenization is {max_tokens}")
        is_special = np.array(encoding.special_tokens_mask, bool)
        starts, ends = np.where(is_special, np.int32(-1), np.array(encoding.offsets, np.int32).reshape(-1, 2).T)
        return TextTokens(_array(encoding.ids), encoding.tokens, starts, ends)

    def text_of(self, token_ids: Iterable[int], *, special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        return self._hidden.sub(lambda match: match[0][1:], text)

    def special_tokens(self, *, pair: bool) -> int:
        return self._tokenizer.num_special_tokens_to_add(pair)

    def encode(self, text: str, text_pair: str | None = None, *, prompt: str = "") -> EncodedText:
        encoding = self._encode_behind(prompt, text, text_pair)
        return EncodedText(_array(encoding.ids), _types(encoding.type_ids))

    def encode_each(self, texts: abc.Sequence[str], *, prompt: str = "") -> abc.Iterator[EncodedText]:
        if prompt and self._special.search(prompt):
            yield from (self.encode(text, prompt=prompt) for text in texts)
            return
        # Texts are encoded together up to the length at which the growth of a single text is checked, so that they take
        # no more memory than a single text may.
        start = size = 0
        for end, text in enumerate(texts):
            length = len(prompt) + len(text)
            if size + length > _LONG_IF_GROWN and size:
                yield from self._encode_short([prompt + text for text in texts[start:end]])
                start, size = end, 0
            size += length
        yield from self._encode_short([prompt + text for text in texts[start:]])

    def _encode_short(self, texts: abc.Sequence[str]) -> abc.Iterator[EncodedText]:
        """Encodes texts that are short together, or one text, with one array for the ids of all."""
        for text in texts:
            _check_growth(self._tokenizer, text)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        ids = [encoding.ids for encoding in encodings]
        together = np.fromiter(chain.from_iterable(ids), np.int32)
        ends = list(accumulate(map(len, ids)))
        none = np.zeros(max(map(len, ids), default=0), np.int32)
        for encoding, own, end in zip(encodings, ids, ends, strict=True):
            types = encoding.type_ids
            count = len(own)
            yield EncodedText(together[end - count : end], _array(types) if any(types) else none[:count])

    def encode_chat(
        self,
        messages: abc.Sequence[Mapping[str, Any]],
        tools: abc.Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> EncodedText:
        parts, ids = self._chat.render(messages, tools, arguments, continues=continues), list[int]()
        _check_growth(self._chat_tokenizer, "".join(parts))
        for index, part in enumerate(parts):
            tokenizer = self._chat_tokenizer if index % 2 else self._trusting_tokenizer
            encode = _encode_behind_other if index else partial(_encode, add_special_tokens=False)
            ids += encode(tokenizer, part).ids if part else []
        return EncodedText(_array(ids), np.zeros(len(ids), np.int32))

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
        encoding = self._encode_behind(prompt, text, text_pair)
        token_ids, token_type_ids = _array(encoding.ids), _types(encoding.type_ids)
        if len(token_ids) <= max_tokens:
            return EncodedText(token_ids, token_type_ids)
        dropped = _dropped(encoding, max_tokens, side, only_first=only_first)
        return EncodedText(np.delete(token_ids, dropped), np.delete(token_type_ids, dropped), len(dropped))

    def encode_windows(self, first: str, second: str, *, max_tokens: int, overlap_tokens: int) -> list[Window]:
        encoding = self._encode_in_limit(first, second, max_tokens, strategy="only_second", stride=overlap_tokens)
        return [_window(part) for part in (encoding, *encoding.overflowing)]

    def encode_words(self, words: abc.Sequence[str]) -> tuple[TokenIds, TokenIds]:
        _check_growth(self._tokenizer, " ".join(words))
        (encoding,) = self._tokenizer.encode_batch([list(words)], is_pretokenized=True, add_special_tokens=False)
        return _array(encoding.ids), np.array(encoding.word_ids, np.int32)

    def locate(self, text: str) -> LocatedText:
        encoding = _encode(self._tokenizer, text, with_offsets=True)
        return self._located(encoding, text)

    def locate_windows(self, text: str, *, max_tokens: int, overlap_tokens: int) -> list[LocatedText]:
        encoding = self._encode_in_limit(text, None, max_tokens, strategy="longest_first", stride=overlap_tokens)
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

    def _encode_behind(self, prompt: str, text: str, text_pair: str | None) -> Encoding:
        """Encodes a text or a pair behind a prompt, whose special tokens are special."""
        matches = [*self._special.finditer(prompt)] if prompt else []
        if not matches or self._reads_special_tokens:
            return _encode(self._tokenizer, prompt + text, text_pair)
        if not (self._special.search(text) or self._special.search(text_pair or "")):
            return _encode(self._trusting_tokenizer, prompt + text, text_pair)
        # The library splits a text at special tokens. So the prompt up to its last special token is encoded by itself,
        # and the rest of the prompt with the caller's text.
        special, end = matches[-1][0], matches[-1].end()
        trusting, bare = self._trusting_tokenizer, partial(_encode, add_special_tokens=False)
        # Some tokenizers put a space before the text behind a special token, others only before the first text.
        begins = bare(trusting, f"{special}a").ids == bare(trusting, special).ids + bare(trusting, "a").ids
        encode_tail = bare if begins else _encode_behind_other
        parts = [bare(trusting, prompt[:end]), encode_tail(self._tokenizer, prompt[end:] + text)]
        second = None if text_pair is None else _encode(self._tokenizer, text_pair, add_special_tokens=False)
        return self._tokenizer.post_process(Encoding.merge(parts, True), second, True)

    def _encode_in_limit(
        self, first: str, second: str | None, max_tokens: int, *, strategy: str, stride: int
    ) -> Encoding:
        windows = self._long_windows if len(first) + len(second or "") > LONG_TEXT else self._short_windows
        return windows.encode(first, second, max_tokens, strategy=strategy, stride=stride)


class _TextWindows:
    """Cuts texts into windows, one text at a time.

    Truncation is a state of the library's object, so this class has a copy of the tokenizer, loaded at its first use.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def load(self) -> Tokenizer:
        """Loads the copy of the tokenizer if needed, and returns it."""
        self._tokenizer = self._tokenizer or self._load()
        return self._tokenizer

    def encode(self, first: str, second: str | None, max_tokens: int, *, strategy: str, stride: int) -> Encoding:
        with self._lock:
            tokenizer = self.load()
            tokenizer.enable_truncation(max_tokens, stride=stride, strategy=strategy)
            return _encode(tokenizer, first, second, with_offsets=True)


def _with_special_pieces(written: bytes, *, in_normalized: bool) -> bytes:
    """Returns the file with a Unigram model's special tokens as ordinary tokens.

    compiler/tokenizers.py hides these tokens from texts. `in_normalized`: False finds no special token in a normalized
    text, because a caller could spell the token in letters of another width.
    """
    content = json.loads(written)
    for token in content["added_tokens"]:
        if token["content"].startswith("\0"):
            token["content"] = content["model"]["vocab"][token["id"]][0] = token["content"][1:]
        token["normalized"] &= in_normalized or not token["special"]
    return json.dumps(content).encode()


def _load(
    written: bytes, *, counts_deleted: bool, reads_special_tokens: bool = False, in_normalized: bool = True
) -> Tokenizer:
    """Loads the library's tokenizer. `reads_special_tokens`: special tokens that a text spells are special."""
    if reads_special_tokens:
        written = _with_special_pieces(written, in_normalized=in_normalized)
    tokenizer = Tokenizer.from_buffer(written)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not reads_special_tokens
    if tokenizer.post_processor is None:  # encode_batch_fast would otherwise give both texts of a pair one type
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")
    if counts_deleted:
        tokenizer.normalizer = _counting_what_it_deletes(tokenizer.normalizer)
    return tokenizer


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _encode(
    tokenizer: Tokenizer,
    text: str,
    text_pair: str | None = None,
    *,
    add_special_tokens: bool = True,
    with_offsets: bool = False,
) -> Encoding:
    _check_growth(tokenizer, text + (text_pair or ""))
    # A batch with a single text: the library's `encode` holds the interpreter's lock, so a text of 1 MB would block
    # every thread for a second.
    inputs = [text] if text_pair is None else [(text, text_pair)]
    # Encoding without offsets takes a sixth less time.
    encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    (encoding,) = encode(inputs, add_special_tokens=add_special_tokens)
    return encoding


def _check_growth(tokenizer: Tokenizer, text: str) -> None:
    """Raises InvalidInput if the normalized text would exceed the limit, before the library makes it."""
    if len(text) <= _LONG_IF_GROWN or tokenizer.normalizer is None:
        return
    by_count: dict[int, list[str]] = {}
    for char, count in _counts(text):
        by_count.setdefault(count, ["a"]).append(f"{char}a")  # separated, because normalizations join marks and letters
    normalize = tokenizer.normalizer.normalize_str
    grown = sum(
        count * (len(normalize("".join(chars))) - len(normalize("a" * len(chars)))) for count, chars in by_count.items()
    )
    if grown > (limit := max(_MOST_GROWN, len(text.encode()))):
        reason = f"{len(text)} characters, of which the model's normalization makes {grown}; the limit is {limit}"
        raise InvalidInput("input", f"a text of {reason}")


def _counts(text: str) -> Iterator[tuple[str, int]]:
    """Counts how often each character of a text occurs.

    A call of NumPy keeps the interpreter's lock. Each call gets a piece of the text, for which other threads wait.
    """
    totals = np.zeros(0, np.int64)
    for start in range(0, len(text), _PIECE):
        points = np.frombuffer(text[start : start + _PIECE].encode("utf-32-le", "surrogatepass"), "<u4")
        counts = np.bincount(points, minlength=len(totals))
        counts[: len(totals)] += totals
        totals = counts
    for point in np.flatnonzero(totals).tolist():
        yield chr(point), int(totals[point])


def _encode_behind_other(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encodes a later part of a text behind a line break, so that it gets no space like the first part."""
    line_break = _encode(tokenizer, "\n", add_special_tokens=False).ids
    encoding = _encode(tokenizer, f"\n{text}", add_special_tokens=False)
    if encoding.ids[: len(line_break)] != line_break:
        return _encode(tokenizer, text, add_special_tokens=False)
    encoding.truncate(len(encoding) - len(line_break), direction="left")
    return encoding


def _counting_what_it_deletes(normalizer: Normalizer) -> Normalizer:
    """Corrects the offsets of a SentencePiece normalizer after deleted control characters.

    The normalizer of the library (tokenizers 0.23, Precompiled) does not count characters that it deletes at the
    beginning of a text and after each added token. All later offsets would be too small. Replace runs first, because it
    counts the characters that it deletes.
    """
    invisible = (char for char in map(chr, (*range(0x2070), 0xFEFF)) if unicodedata.category(char) in ("Cc", "Cf"))
    deleted = [char for char in invisible if normalizer.normalize_str(f"{char}a") == normalizer.normalize_str("a")]
    if not deleted:
        return normalizer
    pattern = "".join(f"\\x{{{ord(char):x}}}" for char in deleted)
    return Sequence([Replace(Regex(rf"\A[{pattern}]+"), ""), normalizer])


def _array(numbers: list[int]) -> TokenIds:
    return np.array(numbers, dtype=np.int32)


def _types(numbers: list[int]) -> TokenIds:
    """Makes an array of the types of tokens. This takes half the time if all are zero, as in most texts."""
    return _array(numbers) if any(numbers) else np.zeros(len(numbers), np.int32)


def _dropped(encoding: Encoding, max_tokens: int, side: Side, *, only_first: bool) -> NDArray[np.intp]:
    """Finds the tokens of a sequence that the library's truncation (longest_first, only_first) would drop.

    The library's own truncation is not used: it would tokenize a second time, and keep every combination of the dropped
    parts, which take 2 GB for two texts of 40 KB.
    """
    owners = np.array([-1 if owner is None else owner for owner in encoding.sequence_ids])
    first, second = np.flatnonzero(owners == 0), np.flatnonzero(owners == 1)
    room = max(max_tokens - int(np.count_nonzero(owners < 0)), 0)
    if only_first:
        kept_counts = max(room - len(second), 1), len(second)
    else:
        shorter = min(len(first), len(second), room // 2)
        kept_counts = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
    parts = zip((first, second), kept_counts, strict=True)
    return np.concatenate(
        [part[count:] if side == "right" else part[: max(len(part) - count, 0)] for part, count in parts]
    )


def _window(encoding: Encoding) -> Window:
    tokens = len(encoding.ids)
    char_start, char_end = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
    is_second = np.array([sequence == 1 for sequence in encoding.sequence_ids], bool)
    offsets = np.array(encoding.offsets, np.int32).reshape(tokens, 2)
    char_start[is_second], char_end[is_second] = offsets[is_second].T
    # A token that is part of a word gets the word's range. The words of the second text are numbered from 0, in order.
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
