from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import read_lines


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "lines"
    path.write_bytes(content)
    return path


def _read(path: Path, max_bytes: int = 100) -> list[tuple[int, str]]:
    return list(read_lines(path, "--lines", max_bytes=max_bytes))


def test_lines_keep_their_numbers_and_their_spaces(tmp_path: Path) -> None:
    content = "\ufeffone\r\n\r\n \t\n  two \n\u2028three\u0085".encode()
    assert _read(_file(tmp_path, content)) == [(1, "one"), (4, "  two "), (5, "\u2028three\u0085")]


def test_a_line_that_is_not_text_is_refused_by_its_number(tmp_path: Path) -> None:
    path = _file(tmp_path, b"one\n\ncaf\xe9\n")
    with pytest.raises(SetupError, match=f"^--lines {path}: line 3 is not UTF-8 \\(byte 4 of the line\\)$"):
        _read(path)


def test_a_file_beyond_the_limit_is_refused_by_the_limit(tmp_path: Path) -> None:
    path = _file(tmp_path, b"1234")
    assert _read(path, max_bytes=4) == [(1, "1234")]
    with pytest.raises(SetupError, match=f"^--lines {path}: more than 3 bytes, the limit of such a file$"):
        _read(path, max_bytes=3)


@pytest.mark.parametrize(("name", "message"), [("none", "No such file or directory"), ("", "Is a directory")])
def test_what_is_no_file_is_refused_by_its_path(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(SetupError, match=f"^--lines {tmp_path / name}: {message}$"):
        _read(tmp_path / name)
