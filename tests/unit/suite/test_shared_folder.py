"""tests/suite/shared_folder.py: what tests share is made once."""

from pathlib import Path

import pytest

from tests.suite.shared_folder import shared_folder


def _write_number(folder: Path) -> None:
    made = len(list(folder.parent.glob("*.complete")))
    (folder / "number").write_text(str(made))


def test_a_folder_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("NEURONPIPE_SHARED_FOLDERS", str(tmp_path))
    for name, made in (("one", "0"), ("other", "1"), ("one", "0"), ("other", "1")):
        assert shared_folder(tmp_path_factory, name, _write_number) == tmp_path / name
        assert (tmp_path / name / "number").read_text() == made


def test_what_could_not_be_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no room")

    monkeypatch.setenv("NEURONPIPE_SHARED_FOLDERS", str(tmp_path))
    with pytest.raises(RuntimeError, match="no room"):
        shared_folder(tmp_path_factory, "one", fail)
    folder = shared_folder(tmp_path_factory, "one", _write_number)
    assert [path.name for path in folder.iterdir()] == ["number"]
