"""platform/watched.py: files are reloaded when they change, and what was good stays while they are not."""

import logging
import os
import threading
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.platform.watched import Watched, watching


def _watched(file: Path) -> Watched[str]:
    def read() -> str:
        try:
            text = file.read_text()
        except OSError as error:
            raise SetupError("cannot be read") from error
        if text == "bad":
            raise SetupError("is bad")
        return text

    return Watched([file], read)


def _seen(watched: Watched[str]) -> tuple[str, str]:
    watched.look()
    return watched.value, watched.problem


def test_a_file_that_cannot_be_used_at_first_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^cannot be read$"):
        _watched(tmp_path / "file")


def test_a_change_is_seen_though_time_and_size_are_the_same(tmp_path: Path) -> None:
    file, written = tmp_path / "file", tmp_path / "other"
    file.write_text("a")
    watched = _watched(file)
    written.write_text("b")
    before = file.stat()
    os.utime(written, ns=(before.st_atime_ns, before.st_mtime_ns))
    written.replace(file)
    assert _seen(watched) == ("b", "")


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces the files of a volume: file → ..data/file, ..data → a folder with a time in its name."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(folder)
    data, file = tmp_path / "..data", tmp_path / "file"
    data.symlink_to("one")
    file.symlink_to("..data/file")
    watched = _watched(file)
    assert _seen(watched) == ("one", "")
    new = tmp_path / "..data_tmp"
    new.symlink_to("two")
    new.replace(data)
    assert _seen(watched) == ("two", "")


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("bad"), Path.unlink], ids=["bad", "gone"])
def test_the_last_good_content_stays_until_there_is_another(tmp_path: Path, spoil: object) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    watched = _watched(file)
    spoil(file)  # type: ignore[operator]
    value, problem = _seen(watched)
    assert value == "a"
    assert problem in ("is bad", "cannot be read")
    file.write_text("b")
    assert _seen(watched) == ("b", "")


def test_what_cannot_be_used_is_tried_again_without_a_change(tmp_path: Path) -> None:
    """A certificate may become valid, and a folder readable, without any change of a file."""
    file = tmp_path / "file"
    file.write_text("a")
    is_valid = True

    def read() -> str:
        if not is_valid:
            raise SetupError("is not valid yet")
        return file.read_text()

    watched = Watched([file], read)
    is_valid = False
    file.write_text("b")
    assert _seen(watched) == ("a", "is not valid yet")
    is_valid = True
    assert _seen(watched) == ("b", "")


def test_what_is_written_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """Two files of which one is old and one new are not a pair, and no problem to report."""
    file = tmp_path / "file"
    file.write_text("a")
    writes = iter(["", "abc", ""])

    def read() -> str:
        text = file.read_text()
        if written := next(writes):
            file.write_text(written)
        return text

    watched = Watched([file], read)
    file.write_text("ab")
    assert _seen(watched) == ("a", "")
    assert _seen(watched) == ("abc", "")


def test_what_is_written_while_it_is_read_for_the_first_time_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    writes = iter(["ab", "abc", ""])

    def read() -> str:
        text = file.read_text()
        if written := next(writes):
            file.write_text(written)
        if written == "abc":
            raise SetupError("half of it is old")
        return text

    assert Watched([file], read).value == "abc"


def test_a_problem_is_logged_once_and_its_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    watched = _watched(file)
    file.write_text("bad")
    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        for _ in range(3):
            watched.look()
        file.write_text("b")
        for _ in range(3):
            watched.look()
    found = [(record.levelname, record.__dict__["fields"]) for record in caplog.records]
    assert found == [("WARNING", {"problem": "is bad"}), ("INFO", {"files": [str(file)]})]


def test_half_a_file_is_not_used_while_its_writer_goes_on(tmp_path: Path) -> None:
    """As the first lines of a file of keys, which are valid, while the rest of the file arrives."""
    file = tmp_path / "file"
    file.write_text("old")
    whole = "all of it"
    written = iter([whole[:length] for length in range(1, len(whole) + 1)])
    values, has_read_whole = {"old"}, threading.Event()

    class BesideWriter(Watched[str]):
        def have_settled(self) -> bool:
            if text := next(written, ""):
                file.write_text(text)
            return super().have_settled()

    def read() -> str:
        text = file.read_text()
        values.add(text)
        if text == whole:
            has_read_whole.set()
        return text

    watched = BesideWriter([file], read)
    with watching(watched, every_s=0.001):
        assert has_read_whole.wait(20)
    assert values == {"old", whole}


def test_a_thread_that_outlives_a_fault_looks_at_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    has_read_anew = threading.Event()
    faults = iter([False, True, False])

    def read() -> str:
        if next(faults):
            raise RuntimeError("a bug")
        text = file.read_text()
        if text == "b":
            has_read_anew.set()
        return text

    watched = Watched([file], read)
    file.write_text("b")
    with watching(watched, every_s=0.001):
        assert has_read_anew.wait(20)
    assert watched.value == "b"
    assert "watched files cannot be looked at" in [record.message for record in caplog.records]
