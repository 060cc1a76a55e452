"""Text is released when it cannot change: whole characters, and no part of a stop string."""

from collections.abc import Sequence

import pytest

from neuronpipe.tasks.generated_text import WINDOW_TOKENS, release


def _bytes_text(token_ids: Sequence[int]) -> str:
    """Each token is a byte of UTF-8."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def _in_parts(text: str, stops: Sequence[str], sizes: Sequence[int]) -> tuple[list[str], int, bool]:
    """What a caller gets who passes tokens as they come: parts, the number of tokens, and whether it was stopped."""
    ids, before = list(text.encode()), list(b"so ")
    parts: list[str] = []
    done = count = 0
    for size in [*sizes, len(ids)]:
        count = min(len(ids), count + size)
        window = (before + ids[:done])[-WINDOW_TOKENS:]
        released = release(_bytes_text, window, ids[done:count], stops, is_last=count == len(ids))
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


def test_no_part_has_half_a_character() -> None:
    parts, _, _ = _in_parts("a😀b", [], [1] * 10)
    assert [part for part in parts if part] == ["a", "😀", "b"]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_ends_the_text_before_it(size: int) -> None:
    parts, tokens, is_stopped = _in_parts("one\n\nHuman: two", ["Human:"], [size] * 100)
    assert "".join(parts) == "one\n\n"
    assert tokens == len("one\n\nHuman:")
    assert is_stopped


def test_no_part_has_the_begin_of_a_stop_string_that_comes() -> None:
    parts, _, _ = _in_parts("abcENDdef", ["END"], [1] * 20)
    assert parts == ["a", "b", "c", "", "", ""]


def test_what_was_no_stop_string_after_all_is_released() -> None:
    parts, _, is_stopped = _in_parts("abENx", ["END"], [1] * 20)
    assert parts == ["a", "b", "", "", "ENx"]
    assert not is_stopped


def test_the_stop_string_that_is_complete_first_counts() -> None:
    parts, tokens, _ = _in_parts("a cat and a dog", ["dog", "cat and", "at"], [100])
    assert ("".join(parts), tokens) == ("a c", len("a cat"))


def test_the_last_tokens_are_text_even_if_they_are_no_character() -> None:
    released = release(_bytes_text, [], list(b"a\xe5\x8c"), [], is_last=True)
    assert released.text == "a\ufffd"
    assert released.tokens == 3


def test_bytes_that_are_no_character_are_not_held_for_ever() -> None:
    released = release(_bytes_text, [], [0x80] * 40, [], is_last=False)
    assert released.tokens >= 16


def test_the_prompt_is_not_part_of_the_text() -> None:
    assert release(_bytes_text, list(b"the prompt"), list(b" goes on"), [], is_last=True).text == " goes on"


def test_a_text_depends_on_the_tokens_before_it() -> None:
    words = ["Hello", "world", "."]

    def text_of(token_ids: Sequence[int]) -> str:  # as a decoder of SentencePiece, without the space at the begin
        return " ".join(words[token_id] for token_id in token_ids)

    assert release(text_of, [0], [1], [], is_last=True).text == " world"
    assert release(text_of, [], [1], [], is_last=True).text == "world"
