"""stages/tokenizer/text.py: MiniLM's WordPiece tokenizer as tasks need it, and which tokens continue a word.

Ids are line numbers, from 0 on, of BERT's published vocab.txt.
"""

import concurrent.futures
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.model import find_minilm
from neuronpipe.core.errors import InvalidInput
from neuronpipe.stages.tokenizer import text as text_module
from neuronpipe.stages.tokenizer.text import JsonTokenizer, WordRule
from neuronpipe.tasks.base import Side, Window
from tests.models.tokenizers import unigram_charsmap
from tests.suite.waiting import until

CLS, SEP, UNK = 101, 102, 100
ONE, TWO, THREE, FOUR, FIVE = 2028, 2048, 2093, 2176, 2274


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    return JsonTokenizer((find_minilm() / "tokenizer.json").read_bytes())


def _whole(tokenizer: JsonTokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode("one two three four five").token_ids.tolist()
    return ids


def test_a_text_gets_its_special_tokens(tokenizer: JsonTokenizer) -> None:
    assert _whole(tokenizer) == [CLS, ONE, TWO, THREE, FOUR, FIVE, SEP]


@pytest.mark.parametrize("prompt", ["", "query: ", "[CLS] query: "])
def test_texts_that_are_encoded_together_equal_each_alone(tokenizer: JsonTokenizer, prompt: str) -> None:
    texts = ["one two", "", "three [SEP]", "one " * 5000, "two", "four " * 3000, "five"]
    together = list(tokenizer.encode_each(texts, prompt=prompt))
    for text, encoded in zip(texts, together, strict=True):
        alone = tokenizer.encode(text, prompt=prompt)
        for name in ("token_ids", "token_type_ids"):
            found, expected = getattr(encoded, name), getattr(alone, name)
            assert found.tolist() == expected.tolist()
            assert found.dtype == expected.dtype == np.int32  # as the wire wants them
    assert not list(tokenizer.encode_each([]))


def test_the_second_text_of_a_pair_is_of_another_type(tokenizer: JsonTokenizer) -> None:
    encoded = tokenizer.encode("one two", "three")
    assert encoded.token_ids.tolist() == [CLS, ONE, TWO, SEP, THREE, SEP]
    assert encoded.token_type_ids.tolist() == [0, 0, 0, 0, 1, 1]


def test_the_files_own_truncation_and_padding_are_not_applied(tokenizer: JsonTokenizer) -> None:
    written = json.loads((find_minilm() / "tokenizer.json").read_text(encoding="utf-8"))
    assert (written["truncation"]["max_length"], written["padding"]["strategy"]) == (128, {"Fixed": 128})
    assert len(tokenizer.encode("one " * 200).token_ids) == 202
    assert len(tokenizer.encode("one").token_ids) == 3


@pytest.mark.parametrize(("pair", "special"), [(False, 2), (True, 3)])
def test_special_tokens_are_counted(tokenizer: JsonTokenizer, pair: bool, special: int) -> None:
    assert tokenizer.special_tokens(pair=pair) == special


def test_a_texts_tokens_are_counted_without_special_ones(tokenizer: JsonTokenizer) -> None:
    assert tokenizer.count("one two three") == 3


@pytest.mark.parametrize(
    ("texts", "max_tokens", "side", "expected", "lost"),
    [
        pytest.param(("one two three four five", None), 4, "right", [CLS, ONE, TWO, SEP], 3, id="the end"),
        pytest.param(("one two three four five", None), 4, "left", [CLS, FOUR, FIVE, SEP], 3, id="the beginning"),
        pytest.param(("one two", None), 4, "right", [CLS, ONE, TWO, SEP], 0, id="nothing where it fits"),
        pytest.param(("one two three four", "five"), 6, "right", [CLS, ONE, TWO, SEP, FIVE, SEP], 2, id="the text"),
        pytest.param(("five", "one two three four"), 6, "right", [CLS, FIVE, SEP, ONE, TWO, SEP], 2, id="the pair"),
    ],
)
def test_the_longer_text_loses_tokens_on_the_side_asked_for(
    tokenizer: JsonTokenizer, texts: tuple[str, str | None], max_tokens: int, side: Side, expected: list[int], lost: int
) -> None:
    encoded = tokenizer.encode_truncated(*texts, max_tokens=max_tokens, side=side)
    assert (encoded.token_ids.tolist(), encoded.truncated_tokens) == (expected, lost)


def _windows(tokenizer: JsonTokenizer, second: str, *, max_tokens: int = 64, overlap_tokens: int = 0) -> list[Window]:
    return tokenizer.encode_windows("one", second, max_tokens=max_tokens, overlap_tokens=overlap_tokens)


def _words_of(window: Window, second: str) -> list[str]:
    """The words that a window's tokens point to; a word of several tokens once."""
    ranges = dict.fromkeys(zip(window.char_start.tolist(), window.char_end.tolist(), strict=True))
    return [second[start:end] for start, end in ranges if start >= 0]


@pytest.mark.parametrize(
    ("overlap_tokens", "expected"),
    [
        # Eight tokens a window less the first text and three special tokens leave four.
        (0, ["abcd", "efgh", "ij"]),
        (1, ["abcd", "defg", "ghij"]),
        (3, ["abcd", "bcde", "cdef", "defg", "efgh", "fghi", "ghij"]),
    ],
)
def test_windows_cover_the_whole_text_and_overlap_as_asked(
    tokenizer: JsonTokenizer, overlap_tokens: int, expected: list[str]
) -> None:
    text = "a b c d e f g h i j"
    windows = _windows(tokenizer, text, max_tokens=8, overlap_tokens=overlap_tokens)
    assert ["".join(_words_of(window, text)) for window in windows] == expected


def test_every_window_holds_the_whole_first_text_and_special_tokens(tokenizer: JsonTokenizer) -> None:
    windows = tokenizer.encode_windows("one two", "a b c d e f", max_tokens=8, overlap_tokens=1)
    expected = [[CLS, ONE, TWO, SEP, SEP]] * 3
    assert [window.token_ids.tolist()[:4] + window.token_ids.tolist()[-1:] for window in windows] == expected


def test_only_tokens_of_the_second_text_have_a_place(tokenizer: JsonTokenizer) -> None:
    (window,) = tokenizer.encode_windows("one two", "two one", max_tokens=64, overlap_tokens=0)
    # [CLS] one two [SEP] two one [SEP]
    assert window.char_start.tolist() == [-1, -1, -1, -1, 0, 4, -1]
    assert window.char_end.tolist() == [-1, -1, -1, -1, 3, 7, -1]


def test_every_token_of_a_word_has_the_whole_words_place(tokenizer: JsonTokenizer) -> None:
    text = "so unbelievably so"
    (window,) = _windows(tokenizer, text)
    assert len(window.token_ids) > len(["[CLS]", "one", "[SEP]", "so", "unbelievably", "so", "[SEP]"])
    assert _words_of(window, text) == ["so", "unbelievably", "so"]


def test_a_word_cut_by_the_windows_edge_has_the_place_of_its_part(tokenizer: JsonTokenizer) -> None:
    # As transformers' pipeline, which knows of a window no more than its own tokens. un ##bel ##ie ##va ##bly.
    text = "unbelievably"
    windows = _windows(tokenizer, text, max_tokens=7, overlap_tokens=0)
    assert [_words_of(window, text) for window in windows] == [["unbelie"], ["vably"]]


@pytest.mark.parametrize(
    "before", ["😀", "👨‍👩‍👧", "cafe\u0301", "ﬁ", "İ", "東京", "\u200b", "a\u0300\u0301\u0302", "\U00010330"], ids=ascii
)
def test_places_are_code_points_of_the_text_as_it_was_sent(tokenizer: JsonTokenizer, before: str) -> None:
    # Each of these changes its length in UTF-8 or UTF-16, or when it is lower-cased, or stripped of accents.
    text = f"{before} one"
    (window,) = _windows(tokenizer, text)
    start, end = window.char_start[-2], window.char_end[-2]
    assert (start, end) == (len(before) + 1, len(text))


def test_characters_that_the_vocabulary_lacks_have_a_place(tokenizer: JsonTokenizer) -> None:
    (window,) = _windows(tokenizer, "I 😀 x")
    place = window.token_ids.tolist().index(UNK)
    assert (window.char_start[place], window.char_end[place]) == (2, 3)


def test_a_second_text_without_tokens_is_one_window_without_places(tokenizer: JsonTokenizer) -> None:
    (window,) = _windows(tokenizer, " \n")
    assert (window.char_start < 0).all()


@pytest.mark.parametrize("text", ["[SEP]", "one [SEP] two", "[CLS][PAD] [UNK]", "[MASK]"])
def test_special_tokens_in_a_text_are_text(tokenizer: JsonTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, text).token_ids.tolist()
    # [PAD] 0, [UNK] 100, [CLS] 101, [SEP] 102, [MASK] 103: those of the pair's own form, and no others.
    assert [token for token in ids if token in (0, 100, 101, 102, 103)] == [CLS, SEP, SEP]


def test_a_token_is_known_by_the_vocabularys_spelling(tokenizer: JsonTokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in ("one", "##bel", "One", "onetwothree", "")]
    assert ids == [ONE, 8671, None, None, None]


def test_a_text_is_located_token_by_token(tokenizer: JsonTokenizer) -> None:
    located = tokenizer.locate("so, unbelievably")
    # [CLS] so , un ##bel ##ie ##va ##bly [SEP]
    assert located.char_start.tolist() == [-1, 0, 2, 4, 6, 9, 11, 13, -1]
    assert located.char_end.tolist() == [-1, 2, 3, 6, 9, 11, 13, 16, -1]
    assert located.continues_word.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_windows_of_a_located_text_begin_with_its_beginning(tokenizer: JsonTokenizer) -> None:
    windows = tokenizer.locate_windows("one two three four five", max_tokens=4, overlap_tokens=1)
    expected = [[ONE, TWO], [TWO, THREE], [THREE, FOUR], [FOUR, FIVE]]
    assert [window.token_ids.tolist()[1:-1] for window in windows] == expected


@pytest.mark.parametrize(("side", "expected"), [("right", [ONE, TWO]), ("left", [FOUR, FIVE])])
def test_a_located_text_loses_tokens_on_the_side_asked_for(
    tokenizer: JsonTokenizer, side: Side, expected: list[int]
) -> None:
    located = tokenizer.locate("one two three four five").truncated(4, side)
    assert (located.token_ids.tolist(), located.truncated_tokens) == ([CLS, *expected, SEP], 3)


def test_truncation_does_not_last_beyond_its_call(tokenizer: JsonTokenizer) -> None:
    tokenizer.encode_truncated("one two three four five", None, max_tokens=4, side="left")
    _windows(tokenizer, "one two three four five", max_tokens=8, overlap_tokens=1)
    assert len(_whole(tokenizer)) == 7
    assert tokenizer.count("one two three four five") == 5


def test_truncation_does_not_last_beyond_a_call_that_fails(tokenizer: JsonTokenizer) -> None:
    with pytest.raises(Exception, match=r"."):
        tokenizer.encode_windows("one two three four five", "one", max_tokens=5, overlap_tokens=0)
    assert len(_whole(tokenizer)) == 7


def test_a_text_of_more_tokens_than_are_asked_for_is_refused(tokenizer: JsonTokenizer) -> None:
    assert len(tokenizer.tokens("a b c", special_tokens=True, max_tokens=5).names) == 5
    with pytest.raises(InvalidInput, match="text: 6 tokens, the limit of tokenization is 5"):
        tokenizer.tokens("a b c d", special_tokens=True, max_tokens=5)


def test_short_windows_do_not_wait_for_long_ones(tokenizer: JsonTokenizer) -> None:
    cut = partial(tokenizer.encode_windows, max_tokens=64, overlap_tokens=8)
    assert cut("Who?", "A short text.")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(cut, "Who?", "word " * 400_000)
        until(tokenizer._long_windows._lock.locked)  # it has begun
        assert cut("Who?", "A short text.")
        assert not long.done()


def test_calls_from_several_threads_do_not_change_each_others_truncation(tokenizer: JsonTokenizer) -> None:
    text = "one two three four five " * 20

    def encode(number: int) -> bool:
        match number % 3:
            case 0:
                return len(tokenizer.encode(text).token_ids) == 102
            case 1:
                return len(tokenizer.encode_truncated(text, None, max_tokens=10, side="right").token_ids) == 10
        # 100 tokens in windows of 16, of which 12 are for the text.
        return len(_windows(tokenizer, text, max_tokens=16)) == 9

    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as threads:
        assert all(threads.map(encode, range(600)))


@pytest.mark.parametrize(
    "text",
    [
        "\x07the class",
        "\x01\x02\x7fthe class",
        "a\x07\x07 the class",
        "<mask>\x07the class",
        "\x07 <mask> \x07 the class",
        "\x07ﬁ the class",
    ],
    ids=ascii,
)
def test_places_are_in_the_callers_text_behind_deleted_control_characters_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        unigram_charsmap(max_tokens=64).backend_tokenizer.to_str(), encoding="utf-8"
    )
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<mask>"  # as the compiler leaves it to a model for fill-mask
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = JsonTokenizer((tmp_path / "tokenizer.json").read_bytes())
    (window,) = tokenizer.encode_windows("a question", text, max_tokens=64, overlap_tokens=0)
    for located in (tokenizer.locate(text), window):
        last = int(located.char_end.argmax())
        assert (
            text[located.char_start[last] : located.char_end[last]] == " class"
        )  # with the space that is part of the token


def test_counting_deleted_characters_changes_no_token(tmp_path: Path) -> None:
    backend = unigram_charsmap(max_tokens=64).backend_tokenizer
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    tokenizer = JsonTokenizer((tmp_path / "tokenizer.json").read_bytes())
    chosen = random.Random(20261122)
    for _ in range(2000):
        text = "".join(chosen.choices("\x01\x07\x1f\x7f\x9f\r\n\t \u200b\u200d\u0301aé①", k=chosen.randint(0, 8)))
        assert tokenizer.encode(text).token_ids.tolist() == backend.encode(text).ids, ascii(text)


def test_tokens_have_their_places_in_the_text_as_it_was_written(tokenizer: JsonTokenizer) -> None:
    text = "Ünhappily, [SEP]"  # lower-cased and without its dots in the vocabulary: "un", "##ha", …
    found = tokenizer.tokens(text, special_tokens=True)
    parts = [text[start:end] for start, end in zip(found.char_start, found.char_end, strict=True) if start >= 0]
    assert "".join(parts) == "Ünhappily,[SEP]"
    assert (found.names[0], found.names[-1]) == ("[CLS]", "[SEP]")
    assert [found.char_start[place] for place in (0, -1)] == [-1, -1]
    assert found.token_ids.tolist().count(SEP) == 1  # what spells a special token is text
    inner = tokenizer.tokens(text, special_tokens=False)
    assert inner.token_ids.tolist() == found.token_ids.tolist()[1:-1]


def test_tokens_become_a_text_with_or_without_the_special_ones(tokenizer: JsonTokenizer) -> None:
    assert tokenizer.text_of([CLS, ONE, TWO, SEP], special_tokens=True) == "[CLS] one two [SEP]"
    assert tokenizer.text_of([CLS, ONE, TWO, SEP], special_tokens=False) == "one two"


_WORD_PIECE: dict[str, Any] = {"continuing_subword_prefix": "##", "unk_token": "[UNK]", "vocab": {"[UNK]": 7}}
_UNIGRAM: dict[str, Any] = {"unk_id": 3, "vocab": [["<s>", 0.0]]}
_BYTE_LEVEL: dict[str, Any] = {"continuing_subword_prefix": "", "unk_token": None, "vocab": {"a": 0}}


def _continues(
    model: dict[str, Any], text: str, tokens: list[tuple[str, int, int]], ids: list[int] | None = None
) -> list[bool]:
    starts, ends = (np.array([token[column] for token in tokens], np.int32) for column in (1, 2))
    token_ids = np.array(ids or [50] * len(tokens), np.int32)
    answer: list[bool] = (
        WordRule.of_model(model).continues_word(text, token_ids, [token[0] for token in tokens], starts, ends).tolist()
    )
    return answer


def test_a_marked_token_continues_a_word() -> None:
    assert _continues(_WORD_PIECE, "unable!", [("un", 0, 2), ("##able", 2, 6), ("!", 6, 7)]) == [False, True, False]


def test_a_token_for_what_the_vocabulary_lacks_is_a_word() -> None:
    assert _continues(_WORD_PIECE, "ꙮ", [("[UNK]", 0, 1)], [7]) == [False]
    assert _continues(_UNIGRAM, "aꙮ", [("▁a", 0, 1), ("ꙮ", 1, 2)], [9, 3]) == [False, False]


@pytest.mark.parametrize("model", [_UNIGRAM, _BYTE_LEVEL], ids=["unigram", "byte-level"])
def test_without_marks_a_token_continues_a_word_unless_a_space_is_before_it(model: dict[str, Any]) -> None:
    tokens = [("a", 0, 1), ("b", 1, 2), ("c", 3, 4), (" d", 4, 6), ("e", 7, 8)]
    # The last space is not one of ASCII's; transformers' pipeline does not count it as a space either.
    assert _continues(model, "ab c d\u00a0e", tokens) == [False, True, False, False, True]


def test_a_token_behind_the_texts_end_does_no_harm() -> None:
    assert _continues(_UNIGRAM, "a ", [("a", 0, 1), ("▁", 1, 2), ("", 2, 2)]) == [False, False, False]


@pytest.mark.parametrize(
    "text",
    ["\ufdfa" * 349_500, "so " * 9 + "\ufdfa\u3300\ufdfb" * 90_000, "\u3300" * 262_500, "x\ufdfa" * 60_000],
    ids=["one character", "between others", "five times", "with letters"],
)
def test_a_text_that_normalization_makes_many_times_longer_is_refused_before_it_is(text: str) -> None:
    tokenizer = JsonTokenizer(unigram_charsmap(max_tokens=64).backend_tokenizer.to_str().encode())
    grown = "makes [0-9]+; the limit is 1048576$"
    for encode in (tokenizer.encode, tokenizer.count, tokenizer.locate, partial(tokenizer.encode, "a")):
        with pytest.raises(InvalidInput, match=grown):
            encode(text)
    with pytest.raises(InvalidInput, match=grown):
        tokenizer.encode_windows("a", text, max_tokens=64, overlap_tokens=8)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_characters_are_counted_over_all_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_PIECE", piece)
    text = "aa\ufdfaé\0\U0010ffffa的"
    assert dict(text_module._counts(text)) == Counter(text)
    assert not [*text_module._counts("")]


@pytest.mark.parametrize(
    "text", ["\ufdfa" * 50_000, "的" * 349_500, "ﬁ" * 349_500, "é e\u0301" * 100_000, "a" * 1_048_576]
)
def test_a_long_text_that_stays_as_long_or_nearly_so_is_tokenized(text: str, tokenizer: JsonTokenizer) -> None:
    normalizing = JsonTokenizer(unigram_charsmap(max_tokens=64).backend_tokenizer.to_str().encode())
    assert all(len(one.encode(text).token_ids) for one in (normalizing, tokenizer))
