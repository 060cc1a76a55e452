"""compiler/source.py: which files of a model count as its weights, and which an index must not name."""

import hashlib
import json
from pathlib import Path

import pytest

from neuronpipe.compiler.source import ModelSource, find_source
from neuronpipe.core.errors import SetupError


def _model(folder: Path, weight: bytes = b"w") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weight)
    return folder


def _digest(folder: Path) -> str:
    return ModelSource(str(folder), folder, None).describe().weights_sha256


def _index(folder: Path, name: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    return folder


@pytest.mark.parametrize("name", ["../private.safetensors", "sub/../../private.safetensors", "/dev/zero"])
def test_an_index_that_names_a_file_outside_of_the_model_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "private.safetensors").write_bytes(b"x")
    with pytest.raises(SetupError, match=r"index\.json: names '.*', which is outside of the model"):
        find_source(str(_index(_model(tmp_path / "model"), name)), None)


def test_an_index_that_names_a_device_by_a_link_is_refused(tmp_path: Path) -> None:
    folder = _index(_model(tmp_path / "model"), "endless.weights")
    (folder / "endless.weights").symlink_to("/dev/zero")
    with pytest.raises(SetupError, match=r"index\.json: names 'endless\.weights', which is no file"):
        find_source(str(folder), None)


def test_weights_behind_a_linked_folder_and_of_other_names_change_the_digest(tmp_path: Path) -> None:
    digests = set()
    for number, weight in enumerate((b"a", b"b")):
        shared = _model(tmp_path / f"shared{number}", weight)
        linked = tmp_path / f"linked{number}"
        linked.mkdir()
        (linked / "part").symlink_to(shared)
        named = _index(_model(tmp_path / f"named{number}"), "first.weights")
        (named / "first.weights").write_bytes(weight)
        digests |= {_digest(linked), _digest(named)}
    assert len(digests) == 4
    assert hashlib.sha256().hexdigest() not in digests, "it would be the digest of nothing"


def test_a_folder_that_links_to_itself_is_read_once(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    before = _digest(folder)
    (folder / "again").symlink_to(folder)
    assert _digest(folder) == before
