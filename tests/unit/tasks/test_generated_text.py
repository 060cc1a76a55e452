"""Text is released when it cannot change: whole characters, whole runs of byte tokens, and no part of a stop string."""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from neuronpipe.stages.postprocessor.detokenizer import load_detokenizer
from neuronpipe.tasks.generated_text import WINDOW_TOKENS, Detokenizer, release


def _bytes_text(token_ids: Sequence[int]) -> str:
    """Each token is a byte of UTF-8."""
    return bytes(token_ids).decode("utf-8", errors="replace")


_BYTES = Detokenizer(_bytes_text)


def _in_parts(text: str, stops: Sequence[str], sizes: Sequence[int]) -> tuple[list[str], int, bool]:
    """What a caller gets who passes tokens as they come: parts, the number of tokens, and whether it was stopped."""
    ids, before = list(text.encode()), list(b"so ")
    parts: list[str] = []
    done = count = 0
    for size in [*sizes, len(ids)]:
        count = min(len(ids), count + size)
        window = (before + ids[:done])[-WINDOW_TOKENS:]
        released = release(_BYTES, window, ids[done:count], stops, is_last=count == len(ids))
        parts.append(released.text)
        done += released.tokens
        if released.is_stopped or count == len(ids):
            return parts, done, released.is_stopped
    raise AssertionError


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_parts_are_the_text_however_the_tokens_are_divided(size: int) -> None:
    text = "naïve 北京 😀 end"
    parts, tokens, is_stopped = _in_parts(text, ["never"], [size] * 100)
    assert "".join(parts) == text
    assert tokens == len(text.encode())
    assert not is_stopped


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_ends_the_text_before_it(size: int) -> None:
    parts, tokens, is_stopped = _in_parts("one\n\nHuman: two", ["Human:"], [size] * 100)
    assert "".join(parts) == "one\n\n"
    assert tokens == len("one\n\nHuman:")
    assert is_stopped


@pytest.mark.parametrize(
    ("stops", "stop_string"),
    [
        (["two", "Human:"], "Human:"),
        (["Human", "Human:"], "Human"),
        (["Human:", "\nHuman:"], "\nHuman:"),
        (["three"], ""),
    ],
    ids=str,
)
def test_the_stop_string_that_ended_the_text_is_named(stops: list[str], stop_string: str) -> None:
    released = release(_BYTES, list(b"so "), list(b"one\n\nHuman: two"), stops, is_last=True)
    assert (released.stop_string, released.is_stopped) == (stop_string, bool(stop_string))


def test_a_stop_string_before_half_a_character_ends_the_text_with_its_token() -> None:
    pieces = (b"x", b"at\xe5", b"\x8c\x97")  # a token may have the end of a word and the begin of a character
    detokenizer = Detokenizer(lambda ids: b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace"))
    for token_ids in ([0, 1], [0, 1, 2]):
        released = release(detokenizer, [], token_ids, ["at"], is_last=False)
        assert (released.text, released.tokens, released.is_stopped) == ("x", 2, True)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a😀b", [], ["a", "", "", "", "😀", "b"]),
        ("abcENDdef", ["END"], ["a", "b", "c", "", "", ""]),
        ("abENx", ["END"], ["a", "b", "", "", "ENx"]),
    ],
    ids=["half a character", "the begin of a stop string", "what was no stop string after all"],
)
def test_no_part_has_what_may_become_another_text(text: str, stops: list[str], expected: list[str]) -> None:
    parts, _, is_stopped = _in_parts(text, stops, [1] * 20)
    assert parts == expected
    assert is_stopped == ("END" in text)


def test_the_stop_string_that_is_complete_first_counts() -> None:
    parts, tokens, _ = _in_parts("a cat and a dog", ["dog", "cat and", "at"], [100])
    assert ("".join(parts), tokens) == ("a c", len("a cat"))


def test_the_last_tokens_are_text_even_if_they_are_no_character() -> None:
    released = release(_BYTES, [], list(b"a\xe5\x8c"), [], is_last=True)
    assert released.text == "a\ufffd"
    assert released.tokens == 3


def test_bytes_that_are_no_character_are_not_held_for_ever() -> None:
    released = release(_BYTES, [], [0x80] * 40, [], is_last=False)
    assert released.tokens >= 37  # the last three may begin a character, as far as one can tell from texts
    assert released.text == "\ufffd" * released.tokens


def test_the_prompt_is_not_part_of_the_text() -> None:
    assert release(_BYTES, list(b"the prompt"), list(b" goes on"), [], is_last=True).text == " goes on"


def test_a_text_depends_on_the_tokens_before_it() -> None:
    words = ["Hello", "world", "."]

    def text_of(token_ids: Sequence[int]) -> str:  # as a decoder of SentencePiece, without the space at the begin
        return " ".join(words[token_id] for token_id in token_ids)

    assert release(Detokenizer(text_of), [0], [1], [], is_last=True).text == " world"
    assert release(Detokenizer(text_of), [], [1], [], is_last=True).text == "world"


# One of each kind of decoder. "[E]" is special; there is no token 90 and above, as in vocabularies that are padded.
_PIECES = ("a", "b c", "\u2581d", "\u2581", "\u2581\u2581e", ".", "##f", "g</w>", "\ufffd", "n't", "h\u2581")
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0x98, 0x9F, 0xBD, 0xE4, 0xA0, 0xF0, 0xFF))


def _tokenizer(pieces: Sequence[str], decoder: Any, **options: bool) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], **options))
    return _with(made, decoder)


def _with(tokenizer: Tokenizer, decoder: Any) -> Tokenizer:
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[E]"])
    return tokenizer


def _byte_level() -> Tokenizer:
    letters = {bytes([value]): letter for value, letter in _byte_letters().items()}
    whole = [b"a", b" b", b"\xe4\xbd\xa0", b"\xa0\xe4", b"c\xf0\x9f", b"\xef\xbf\xbd", b"\x98\x80d"]
    pieces = ["".join(letters[bytes([byte])] for byte in piece) for piece in whole]
    return _tokenizer(
        [*pieces, *(letters[bytes([byte])] for byte in b"\x80\x98\x9f\xe4\xbd\xf0\xff")], decoders.ByteLevel()
    )


def _byte_letters() -> Mapping[int, str]:
    """The letter for each byte, as GPT-2 has them: printable ones stay, the others are numbered from 256 on."""
    free, letters = count(256), {}
    for byte in range(256):
        is_printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        letters[byte] = chr(byte if is_printable else next(free))
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def _byte_fallback(*, strip: bool) -> Tokenizer:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _tokenizer([*_PIECES, *_BYTE_PIECES], decoder, byte_fallback=True)


def _of_words() -> Tokenizer:
    return _with(Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(_PIECES)}, "a")), None)


def _unigram(end: str = "\0</s>") -> Tokenizer:
    # As the compiler writes special tokens of Unigram models.
    pieces = [(piece, -1.0) for piece in (*_PIECES, end)]
    return _with(Tokenizer(models.Unigram(pieces, 0, byte_fallback=False)), decoders.Metaspace())


_TOKENIZERS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": _byte_level,
    "BPE with byte fallback, of Llama": lambda: _byte_fallback(strip=True),
    "BPE with byte fallback, of Gemma": lambda: _byte_fallback(strip=False),
    "BPE with ends of words": lambda: _tokenizer(_PIECES, decoders.BPEDecoder("</w>")),
    "Unigram": _unigram,
    "WordPiece": lambda: _tokenizer(_PIECES, decoders.WordPiece()),
    "words": _of_words,
    "CTC": lambda: _tokenizer(_PIECES, decoders.CTC("a", "\u2581")),
}


class _Case:
    """Random tokens of a tokenizer, and what is released of them."""

    def __init__(self, kind: str) -> None:
        self.tokenizer = _TOKENIZERS[kind]()
        self.detokenizer = load_detokenizer(self.tokenizer.to_str().encode())
        self.chosen = random.Random(zlib.crc32(kind.encode()))
        self.hidden = self.tokenizer.token_to_id("\0</s>")
        byte_ids = [self.tokenizer.token_to_id(piece) for piece in _BYTE_PIECES]
        self._byte_ids = [byte_id for byte_id in byte_ids if byte_id is not None]

    def ids(self) -> list[int]:
        """Tokens of all kinds; some are mostly bytes, or mostly without a text."""
        ids = range(self.tokenizer.get_vocab_size())
        likely = self.chosen.choice([[*ids], self._byte_ids or [*ids], [self.tokenizer.token_to_id("[E]"), 90]])
        return [
            self.chosen.choice(likely if self.chosen.random() < 0.7 else ids) for _ in range(self.chosen.randrange(40))
        ]

    def text(self, ids: Sequence[int]) -> str:
        """As transformers decodes them."""
        reference = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer)
        kept = [token_id for token_id in ids if token_id != self.hidden]
        return str(reference.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def whole_text(self, ids: Sequence[int]) -> str:
        """As transformers decodes them with special tokens. Of a Unigram model, with the tokenizer as it was."""
        tokenizer = self.tokenizer if self.hidden is None else _unigram("</s>")
        reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        return str(reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def released(self, prompt: list[int], ids: list[int], stops: Sequence[str], most: int) -> tuple[list[str], int]:
        """The parts of a caller who passes up to so many tokens at once, and the number of tokens."""
        parts, done, passed = list[str](), 0, 0
        while True:
            passed = min(len(ids), passed + self.chosen.randint(1, most))
            window, is_last = [*prompt, *ids[:done]][-WINDOW_TOKENS:], passed == len(ids)
            released = release(self.detokenizer, window, ids[done:passed], stops, is_last=is_last)
            parts.append(released.text)
            done += released.tokens
            if is_last or released.is_stopped:
                return parts, done


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_parts_are_what_transformers_decodes_however_the_tokens_are_divided(kind: str) -> None:
    case = _Case(kind)
    for _ in range(300):
        ids = case.ids()
        parts, tokens = case.released([], ids, [], case.chosen.choice([1, 3, 40]))
        assert ("".join(parts), tokens) == (case.text(ids), len(ids)), ids


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_parts_have_special_tokens_as_transformers_decodes_them_where_a_caller_wants_them(kind: str) -> None:
    case = _Case(kind)
    assert case.detokenizer.with_special
    case.detokenizer = case.detokenizer.with_special
    first = case.tokenizer.token_to_id(".") or 0
    for prompt in ([], [first]):
        behind = len(case.whole_text(prompt))
        for _ in range(150):
            ids = case.ids()
            parts, tokens = case.released(prompt, ids, [], case.chosen.choice([1, 3, 40]))
            assert ("".join(parts), tokens) == (case.whole_text([*prompt, *ids])[behind:], len(ids)), (prompt, ids)
    assert (end := case.tokenizer.token_to_id("[E]")) is not None
    assert case.detokenizer.bytes_of(end, []) == b"[E]"
    assert case.hidden is None or case.detokenizer.bytes_of(case.hidden, []) == b"</s>"


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_a_text_after_a_prompt_is_what_transformers_decodes_behind_it(kind: str) -> None:
    case = _Case(kind)
    first = case.tokenizer.token_to_id(".") or 0
    for _ in range(300):
        prompt, ids = [*case.ids(), first], case.ids()
        parts, _ = case.released(prompt, ids, [], case.chosen.choice([1, 3, 40]))
        assert "".join(parts) == case.text([*prompt, *ids])[len(case.text(prompt)) :], (prompt, ids)


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_a_stop_string_ends_the_same_text_however_the_tokens_are_divided(kind: str) -> None:
    case = _Case(kind)
    for _ in range(300):
        ids, stops = case.ids(), case.chosen.choice([["."], ["e", "d."], ["\n"], ["\ufffd", "Ab"]])
        parts, tokens = case.released([], ids, stops, 1)
        whole, whole_tokens = case.released([], ids, stops, 40)
        assert ("".join(parts), tokens) == ("".join(whole), whole_tokens), (ids, stops)
        text = case.text(ids)
        assert "".join(parts) == text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


@pytest.mark.parametrize(
    ("kind", "is_fast"),
    [
        ("byte-level BPE", True),
        ("BPE with byte fallback, of Llama", True),
        ("BPE with byte fallback, of Gemma", True),
        ("Unigram", False),
        ("WordPiece", False),
    ],
)
def test_plain_tokens_need_no_decoder(kind: str, is_fast: bool) -> None:
    case = _Case(kind)
    first = case.tokenizer.token_to_id("a") or 0
    ids = [token_id for token_id in range(9) if case.detokenizer.plain_bytes(token_id)]
    assert bool(ids) == is_fast
    decoded: list[Sequence[int]] = []

    def text_of(token_ids: Sequence[int]) -> str:
        decoded.append(token_ids)
        return case.detokenizer.text_of(token_ids)

    watched = replace(case.detokenizer, text_of=text_of)
    for stops in ([], ["never"]):
        released = release(watched, [first], [first], stops, is_last=False)
        assert (released.text, released.tokens) == (case.text([first, first])[1:], 1)
    assert bool(decoded) != is_fast


_LLAMA = "BPE with byte fallback, of Llama"


def _llama_ids(*pieces: str) -> list[int]:
    found = [_Case(_LLAMA).tokenizer.token_to_id(piece) for piece in pieces]
    return [token_id for token_id in found if token_id is not None]


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    case, run = _Case(_LLAMA), _llama_ids("<0xE4>", "<0xBD>", "<0xA0>", "[E]", "<0x41>")
    open_run = release(case.detokenizer, [], run, [], is_last=False)
    assert (open_run.text, open_run.tokens) == ("", 0)  # a byte that is no character would make five U+FFFD of it
    ended = release(case.detokenizer, [], [*run, *_llama_ids("a")], [], is_last=False)
    assert (ended.text, ended.tokens) == ("\u4f60Aa", 6)
    assert release(case.detokenizer, [], run, [], is_last=True).text == "\u4f60A"


def test_a_prompt_that_ends_with_bytes_is_no_part_of_the_first_run() -> None:
    case, prompt, run = _Case(_LLAMA), _llama_ids("a", "<0xE4>", "<0xBD>", "<0xA0>"), _llama_ids("<0xFF>", "a")
    assert release(case.detokenizer, prompt, run, [], is_last=True).text == "\ufffda"
    assert release(case.detokenizer, prompt, _llama_ids("\u2581d"), [], is_last=True).text == " d"


def test_a_stop_string_of_byte_tokens_ends_the_text_with_its_run() -> None:
    case, ids = _Case(_LLAMA), _llama_ids("a", "<0x0A>", "<0x0A>", ".")
    released = release(case.detokenizer, [], ids, ["\n\n"], is_last=False)
    assert (released.text, released.tokens, released.is_stopped) == ("a", 3, True)
