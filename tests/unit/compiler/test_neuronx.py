"""compiler/neuronx.py: an artefact is found by all that it depends on, and never half."""

import errno
import shutil
from pathlib import Path

import pytest

from neuronpipe.compiler.neuronx import ArtifactCache
from neuronpipe.core.errors import SetupError

_STAMP = {"bucket": "8x128", "flags": ["--target=inf2"], "versions": {"neuronx-cc": "2.26"}, "weights_sha256": "0"}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "artifact.pt"
    path.write_bytes(b"compiled")
    return path


def test_an_artefact_is_found_by_its_stamp(tmp_path: Path, artifact: Path) -> None:
    ArtifactCache(tmp_path / "cache").add(_STAMP, artifact)
    found = ArtifactCache(tmp_path / "cache").find(_STAMP)
    assert found is not None
    assert found.read_bytes() == b"compiled"


@pytest.mark.parametrize("name", _STAMP)
def test_an_artefact_of_another_stamp_is_another(name: str, tmp_path: Path, artifact: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    cache.add(_STAMP, artifact)
    assert cache.find(_STAMP | {name: "other"}) is None


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_an_artefact_that_is_broken_or_half_there_is_not_found_and_can_be_added_again(
    suffix: str, tmp_path: Path, artifact: Path
) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    cache.add(_STAMP, artifact)
    (broken,) = (tmp_path / "cache").glob(f"*{suffix}")
    broken.write_bytes(b"half")
    assert cache.find(_STAMP) is None
    broken.unlink()
    assert cache.find(_STAMP) is None
    cache.add(_STAMP, artifact)
    assert cache.find(_STAMP) is not None


@pytest.mark.parametrize("content", ["[]", "1", '{"sha256": 1}', '{"sha256": []}', "{}", "null"])
def test_a_description_that_is_another_json_is_no_artefact(content: str, tmp_path: Path, artifact: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    cache.add(_STAMP, artifact)
    (description,) = (tmp_path / "cache").glob("*.json")
    description.write_text(content)
    assert cache.find(_STAMP) is None


def test_of_two_artefacts_of_one_stamp_the_last_one_counts(tmp_path: Path, artifact: Path) -> None:
    cache, recompiled = ArtifactCache(tmp_path / "cache"), tmp_path / "other.pt"
    recompiled.write_bytes(b"compiled again")
    cache.add(_STAMP, artifact)
    cache.add(_STAMP, recompiled)
    found = cache.find(_STAMP)
    assert found is not None
    assert found.read_bytes() == b"compiled again"


def test_what_cannot_be_written_is_refused(tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    cache = ArtifactCache(tmp_path / "cache")
    monkeypatch.setattr(shutil, "copyfile", full)
    problem = f"^{tmp_path}/cache: cannot be written: No space left on device; see --compile-cache"
    with pytest.raises(SetupError, match=problem):
        cache.add(_STAMP, artifact)
    assert not list((tmp_path / "cache").iterdir())


def test_a_folder_that_cannot_be_made_is_refused(artifact: Path) -> None:
    with pytest.raises(SetupError, match=f"^{artifact}/cache: cannot be made: .*--compile-cache"):
        ArtifactCache(artifact / "cache")
