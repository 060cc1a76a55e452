"""texts.py: the built-in texts, and files."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.model import find_minilm
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load import texts
from neuronpipe.measure.load.texts import builtin_texts, read_texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(find_minilm() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def test_builtin_texts_have_the_length_that_is_promised(tokenizer: Tokenizer) -> None:
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(builtin_texts(0))]
    # 32.8 and 126 under Python 3.11; other versions have slightly other texts.
    assert 29 <= sum(lengths) / len(lengths) <= 37
    assert max(lengths) <= 140
    assert min(lengths) >= 4


def test_builtin_texts_are_many_and_different() -> None:
    found = builtin_texts(0)
    assert len(found) == len(set(found)) > 1000


def test_builtin_texts_are_single_lines_of_prose() -> None:
    assert [text for text in builtin_texts(0) if "\n" in text or "  " in text or "====" in text or "::=" in text] == []


def test_equal_seeds_give_equal_texts_and_different_ones_do_not() -> None:
    assert builtin_texts(3) == builtin_texts(3)
    assert builtin_texts(3) != builtin_texts(4)


def test_builtin_texts_are_shuffled() -> None:
    # The first hundred of 1,800 have about six in common by chance, and nearly all where both keep the order of their
    # source.
    assert len(set(builtin_texts(3)[:100]) & set(builtin_texts(4)[:100])) < 30


def test_a_file_holds_a_text_a_line(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_bytes("\ufeffeins\r\n\n  zwei Wörter \n\t\n三".encode())
    assert read_texts(file) == ["eins", "zwei Wörter", "三"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no text"),
        (b" \n\n\t\n", "has no text"),
        (b"a\nb\nab\xff\n", "line 3 is not UTF-8 (byte 3 of the line)"),
        (b"\xe9t\xe9", "line 1 is not UTF-8 (byte 1 of the line)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "texts"
    file.write_bytes(content)
    with pytest.raises(SetupError) as caught:
        read_texts(file)
    assert str(caught.value) == f"--texts {file}: {problem}"


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"--texts {tmp_path}/none: No such file or directory"):
        read_texts(tmp_path / "none")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"--texts {tmp_path}: Is a directory"):
        read_texts(tmp_path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_MAX_FILE_BYTES", 3)
    file = tmp_path / "texts"
    file.write_text("four")
    with pytest.raises(SetupError, match="more than 3 bytes, the limit of such a file"):
        read_texts(file)
