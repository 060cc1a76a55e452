"""compiler/samples.py: which texts of a file are taken for what, and which files are refused."""

import hashlib
from pathlib import Path

import pytest

from neuronpipe.bundles.manifest import Calibration
from neuronpipe.compiler import samples
from neuronpipe.compiler.samples import (
    MAX_COMPARED,
    MAX_TEXTS,
    MIN_TEXTS,
    built_in_calibration,
    read_calibration,
    sentences,
)
from neuronpipe.core.errors import SetupError

_ENOUGH = [f"text {number}" for number in range(MIN_TEXTS)]


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "texts.txt"
    path.write_bytes(content)
    return path


def _lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def test_each_line_is_a_text_and_the_file_is_known_by_its_digest(tmp_path: Path) -> None:
    path = _file(tmp_path, _lines(*_ENOUGH))
    read = read_calibration(path)
    assert (read.texts, read.compared) == (_ENOUGH[::2], _ENOUGH[1::2])
    assert read.description.texts == MIN_TEXTS / 2
    assert read.description.source == str(path)
    assert read.description.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_byte_order_mark_line_ends_and_empty_lines_are_no_text(tmp_path: Path) -> None:
    path = _file(tmp_path, b"\xef\xbb\xbf\r\n" + b"\r\n \t\r\n".join(text.encode() for text in _ENOUGH))
    assert read_calibration(path).texts == _ENOUGH[::2]


def test_only_a_line_feed_ends_a_text(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\x0cd"  # where str.splitlines would cut
    assert read_calibration(_file(tmp_path, _lines(odd, *_ENOUGH))).texts == [odd, *_ENOUGH[1::2]]


def test_of_many_texts_some_are_taken_from_the_whole_file(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(8 * MAX_TEXTS)]
    read = read_calibration(_file(tmp_path, _lines(*texts)))
    assert read.texts == texts[::8]
    assert read.description.texts == MAX_TEXTS
    assert len(read.compared) == MAX_COMPARED
    assert read.compared[0] == texts[1]
    assert int(str(read.compared[-1]).removeprefix("text ")) > 7.9 * MAX_TEXTS


def test_without_a_file_there_are_different_texts_of_our_own_half_of_them_in_other_languages() -> None:
    read = built_in_calibration(of_images=False)
    assert MIN_TEXTS < len(set(read.texts)) == len(read.texts) == read.description.texts
    others = [text for text in read.texts if any(str(text).startswith(tuple(one[::2])) for one in sentences().values())]
    assert 2 * len(others) >= len(read.texts)
    assert read.description.source == f"built-in sample text in {len(sentences()) + 1} languages"
    assert read.description.source_sha256 is None
    assert read.compared == ()


def test_every_language_has_the_same_sentences_of_its_own() -> None:
    assert len(sentences()) >= 15
    assert {len(one) for one in sentences().values()} == {6}
    every = [sentence for one in sentences().values() for sentence in one]
    assert len(set(every)) == len(every)
    # The third and the last are the shortest and one of the longest, which calibration and comparison share.
    assert all(len(one[2]) < len(one[0]) < len(one[5]) for one in sentences().values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "texts.txt: 0 different texts, one a line; calibration takes at least 64"),
        (b"\n \n\n", "texts.txt: 0 different texts"),
        (_lines(*_ENOUGH[1:]), "texts.txt: 63 different texts"),
        (_lines(*["the same"] * 1000), "texts.txt: 1 different texts"),
        (_lines(*_ENOUGH, "caf\u00e9") + b"caf\xe9\n", "texts.txt: line 66 is not UTF-8"),
        ("\n".join(_ENOUGH).encode("utf-16"), "texts.txt: line 1 is not UTF-8"),
    ],
    ids=["empty", "blank", "too few", "one text", "latin-1", "utf-16"],
)
def test_file_that_cannot_calibrate_is_refused_by_its_line_or_limit(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        read_calibration(_file(tmp_path, content))


def test_what_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(SetupError, match=f"^--calibration {path}: No such file or directory$"):
        read_calibration(path)


def test_every_second_image_of_a_folder_is_compared_on_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "further").mkdir()
    names = [*(f"{number:02}.png" for number in range(MIN_TEXTS - 2)), "90.JPG", "further/91.webp"]
    for name in (*names, "notes.txt"):
        (tmp_path / name).write_bytes(b"not read yet")
    read = read_calibration(tmp_path)
    ordered = sorted(tmp_path / name for name in names)
    assert (read.texts, read.compared) == (ordered[::2], ordered[1::2])
    assert read.description == Calibration(texts=MIN_TEXTS // 2, source=str(tmp_path))


def test_a_folder_of_too_few_images_is_refused_with_what_counts_as_one(tmp_path: Path) -> None:
    (tmp_path / "one.png").touch()
    with pytest.raises(SetupError, match=r"1 images \(\.jpeg, \.jpg, \.png, \.webp\); calibration takes at least 64"):
        read_calibration(tmp_path)


def test_file_without_an_end_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MAX_BYTES", 1024 * 1024)
    with pytest.raises(SetupError, match="/dev/zero: more than 1,048,576 bytes"):
        read_calibration(Path("/dev/zero"))
