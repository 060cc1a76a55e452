"""bundles/repository.py: bundles are whole or not there, and what was changed is not loaded."""

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import bundle_folders, read_bundle, read_repository
from neuronpipe.bundles.writing import (
    check_writable,
    choose_version,
    default_name,
    new_bundle,
    newest_bundle,
    write_manifest,
)
from neuronpipe.core.errors import SetupError
from tests.unit.bundles.written import manifest, write_bundle, write_files


class _Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


def _everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_every_bundle_is_found(tmp_path: Path) -> None:
    for name, version in (("b", 1), ("a", 2), ("a", 10)):
        write_bundle(tmp_path, name, version)
    assert {bundle.key for bundle in read_repository(tmp_path)} == {("a", 2), ("a", 10), ("b", 1)}


def test_a_bundle_may_stand_in_place_of_a_repository_wherever_it_is(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "repository", "a", 2).rename(tmp_path / "model")
    (bundle,) = read_repository(folder)
    assert (bundle.key, bundle.folder) == (("a", 2), folder)


def test_a_model_without_versions_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(SetupError, match="holds no bundle"):
        read_repository(tmp_path)


@pytest.mark.parametrize("stray", [".hidden/1", "m/.2.tmp", "notes.txt", "m/README"])
def test_hidden_folders_and_stray_files_are_passed_over(tmp_path: Path, stray: str) -> None:
    write_bundle(tmp_path)
    path = tmp_path / stray
    if path.suffix == ".txt" or path.name == "README":
        path.write_text("")
    else:
        path.mkdir(parents=True)
    assert [bundle.key for bundle in read_repository(tmp_path)] == [("m", 1)]


def test_a_folder_without_a_manifest_beside_bundles_is_refused_by_its_path(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    (write_bundle(tmp_path, "n") / "manifest.json").unlink()
    with pytest.raises(SetupError, match=f"^{tmp_path}/n/1: is not a bundle: it has no manifest.json; a repository"):
        read_repository(tmp_path)


# What a repository is not → what is said of it. {0}: the folder that has all of them.
_WRONG = {
    "": "holds no bundle: it holds repositories: {0}/models",
    "models/m": "holds no bundle: it is a model of the repository {0}/models",
    "models/m/1/artifacts": "holds no bundle: it is a part of {0}/models/m/1, a bundle of the repository {0}/models",
    "keys": "holds no bundle: it holds ca.pem, private, tls.crt, …",
    "hub": "holds no bundle: it looks like a model of Hugging Face; `neuronpipe compile {0}/hub --repo",
    "keys/tls.key": "is a file",
    "killed": "holds no bundle: {0}/killed/m/.1.k3_9abcd is half-written, by a compile that was killed or still runs",
    "empty": "holds no bundle; make one with `neuronpipe compile SOURCE --repository {0}/empty`",
    "none": "no such folder; make a repository with `neuronpipe compile SOURCE --repository {0}/none`",
}


@pytest.mark.parametrize("place", _WRONG)
def test_a_wrong_repository_is_told_what_it_is_and_never_to_delete_anything(place: str, tmp_path: Path) -> None:
    write_bundle(tmp_path / "models")
    for name in ("keys/ca.pem", "keys/tls.crt", "keys/tls.key", "keys/private/old/a.pem", "hub/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name in ("hub/onnx/quantized", "killed/m/.1.k3_9abcd", "empty"):
        (tmp_path / name).mkdir(parents=True)
    wrong = tmp_path / place
    for read in (read_repository, bundle_folders):
        with pytest.raises(SetupError, match="^" + re.escape(f"{wrong}: {_WRONG[place].format(tmp_path)}")) as told:
            read(wrong)
        assert "delete" not in str(told.value)
        assert re.search(
            r"; a repository holds bundles alone|; make (one|a repository) with `neuronpipe", str(told.value)
        )


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").mkdir()
    iterate = Path.iterdir

    def iterate_as_another_user(folder: Path) -> Iterator[Path]:  # root may read all
        if folder.name == "private":
            raise PermissionError(errno.EACCES, "denied")
        return iterate(folder)

    monkeypatch.setattr(Path, "iterdir", iterate_as_another_user)
    with pytest.raises(SetupError, match=f"^{tmp_path}/private: cannot be read: Permission denied"):
        read_repository(tmp_path)


@pytest.mark.parametrize("place", ["m/2", "other/1"])
def test_a_bundle_that_was_moved_is_refused(tmp_path: Path, place: str) -> None:
    folder = write_bundle(tmp_path)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    folder.rename(tmp_path / place)
    problem = f"^{tmp_path / place}: its manifest is for m/1; the folder was moved or renamed"
    with pytest.raises(SetupError, match=problem):
        read_repository(tmp_path)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    (folder / "artifacts/openvino/model.bin").write_bytes(bytes(256))
    bundle = read_bundle(folder)
    problem = r"model.bin: changed since it was compiled"
    with pytest.raises(SetupError, match=problem), bundle.artifact_files(bundle.artifact("openvino")):
        pass


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SetupError, match=r"tokenizer.json: missing, though the manifest names it"):
        read_bundle(folder).tokenizer_json()


def test_a_file_that_came_without_a_digest_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, tokenizer_file="late.json")
    (folder / "late.json").write_text("{}")
    with pytest.raises(SetupError, match=r"late.json: changed since it was compiled"):
        read_bundle(folder).tokenizer_json()


def test_files_that_are_as_compiled_are_given_out(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    bundle = read_bundle(folder)
    assert bundle.tokenizer_json() == (folder / "tokenizer.json").read_bytes()
    with bundle.artifact_files(bundle.artifact("openvino")) as files:
        assert files == [folder / "artifacts/openvino/model.xml", folder / "artifacts/openvino/model.bin"]


@pytest.mark.parametrize(("asked", "given"), [("", "openvino"), ("openvino", "openvino"), ("fake", "fake")])
def test_the_artefact_is_the_back_ends_or_else_the_first(tmp_path: Path, asked: str, given: str) -> None:
    assert read_bundle(write_bundle(tmp_path)).artifact(asked).backend == given


def test_a_back_end_without_an_artefact_is_told_which_there_are(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    problem = f"^{folder}: no artefact for the back end 'neuronx', only for: openvino, fake"
    with pytest.raises(SetupError, match=problem):
        read_bundle(folder).artifact("neuronx")


def test_equal_bundles_have_equal_digests(tmp_path: Path) -> None:
    first, second = (read_bundle(write_bundle(tmp_path / place)) for place in ("one", "other"))
    assert first.digest == second.digest


def test_a_bundle_with_another_file_has_another_digest(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path / "one"))
    with new_bundle(tmp_path / "other", "m", 1) as folder:
        write_files(folder)
        (folder / "tokenizer.json").write_text("[]")
        write_manifest(folder, manifest())
    assert read_bundle(tmp_path / "other/m/1").digest != bundle.digest


def test_the_manifest_has_the_digest_of_every_file_but_itself(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    expected = ["artifacts/openvino/model.bin", "artifacts/openvino/model.xml", "tokenizer.json"]
    assert sorted(read_bundle(folder).manifest.files) == expected


def test_a_bundle_shows_only_when_it_is_whole(tmp_path: Path) -> None:
    write_bundle(tmp_path, "m", 1)
    with new_bundle(tmp_path, "m", 2) as folder:
        write_files(folder)
        assert [bundle.key for bundle in read_repository(tmp_path)] == [("m", 1)]
        write_manifest(folder, manifest("m", 2))
    assert [bundle.key for bundle in read_repository(tmp_path)] == [("m", 1), ("m", 2)]


@pytest.mark.parametrize("fault", [RuntimeError, _Interrupted])
def test_a_bundle_that_fails_leaves_nothing_behind(tmp_path: Path, fault: type[BaseException]) -> None:
    with pytest.raises(fault), new_bundle(tmp_path, "m", 1) as folder:  # noqa: PT012
        write_files(folder)
        raise fault
    assert _everything_in(tmp_path) == []


def test_a_bundle_that_fails_leaves_the_versions_that_are_there(tmp_path: Path) -> None:
    write_bundle(tmp_path, "m", 1)
    before = _everything_in(tmp_path)
    with pytest.raises(RuntimeError), new_bundle(tmp_path, "m", 2) as folder:  # noqa: PT012
        write_files(folder)
        raise RuntimeError
    assert _everything_in(tmp_path) == before


def test_a_version_that_someone_else_wrote_meanwhile_is_kept_and_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"^{tmp_path}/m/1: exists"), new_bundle(tmp_path, "m", 1) as folder:  # noqa: PT012
        write_bundle(tmp_path, "m", 1)
        before = _everything_in(tmp_path / "m/1")
        write_files(folder)
    assert _everything_in(tmp_path / "m") == sorted(["1", *(f"1/{name}" for name in before)])


def test_others_may_read_a_bundle(tmp_path: Path) -> None:
    # Services often run as another user than the one who compiled.
    assert write_bundle(tmp_path).stat().st_mode & 0o777 == 0o755


def test_the_first_version_is_one(tmp_path: Path) -> None:
    assert choose_version(tmp_path, "m", None) == 1


def test_the_next_version_is_one_more_than_the_highest(tmp_path: Path) -> None:
    for version in (2, 10):
        write_bundle(tmp_path, "m", version)
    assert choose_version(tmp_path, "m", None) == 11


def test_the_version_asked_for_is_taken_where_it_is_free(tmp_path: Path) -> None:
    write_bundle(tmp_path, "m", 3)
    assert choose_version(tmp_path, "m", 2) == 2


def test_the_version_asked_for_is_refused_where_it_is_not_free(tmp_path: Path) -> None:
    write_bundle(tmp_path, "m", 3)
    with pytest.raises(SetupError, match=f"^{tmp_path}/m/3: exists"):
        choose_version(tmp_path, "m", 3)


def test_a_repository_can_be_copied(tmp_path: Path) -> None:
    write_bundle(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (bundle,) = read_repository(tmp_path / "there")
    assert bundle.folder == tmp_path / "there/m/1"
    assert bundle.tokenizer_json() == b"{}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (".", "mine"),
        ("./", "mine"),
        ("..", "models"),
        ("../mine/", "mine"),
        ("/models/bert-base", "bert-base"),
        ("/models/bert-base//", "bert-base"),
        ("/models/bert-base/.", "bert-base"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_model_without_a_name_gets_the_last_part_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models" / "mine")
    assert default_name(source) == name


def test_a_link_to_a_model_gives_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "1a2b3c").mkdir()
    (tmp_path / "bert").symlink_to("1a2b3c")
    assert default_name(str(tmp_path / "bert")) == "bert"


@pytest.mark.parametrize("name", ["", " ", ".", "..", ".hidden", "a/b", "/a", "nul\0", "line\n", "\udcff"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match=r"^name .* cannot be a folder's name; choose one with --name"):
        check_writable(tmp_path, name)


@pytest.mark.parametrize("name", ["m" * 256, "北" * 86])  # a folder's name holds 255 bytes; 86 * 3 = 258
def test_a_name_that_is_too_long_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match=r"cannot be written to: File name too long"):
        check_writable(tmp_path, name)


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_repository_that_is_a_file_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=f"^{tmp_path}/{place}/m: cannot be written to: Not a directory"):
        check_writable(tmp_path / place, "m")


# Nobody, not even root, can make a folder in /proc.
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_repository_that_cannot_be_written_to_is_refused() -> None:
    for repository in Path("/proc"), Path("/proc/models"):
        with pytest.raises(SetupError, match=f"^{repository}/m: cannot be written to: "):
            check_writable(repository, "m")
        problem = f"^{repository}/m: cannot be written to: "
        with pytest.raises(SetupError, match=problem), new_bundle(repository, "m", 1):
            pass


@pytest.mark.parametrize("place", [".", "not/yet/there"])
def test_finding_out_whether_a_repository_is_writable_leaves_it_as_it_was(tmp_path: Path, place: str) -> None:
    write_bundle(tmp_path)
    before = _everything_in(tmp_path)
    for name in ("m", "other", "m" * 255, "北京"):
        check_writable(tmp_path / place, name)
    assert _everything_in(tmp_path) == before


def test_the_newest_bundle_is_that_of_the_highest_version_for_the_back_end(tmp_path: Path) -> None:
    for version in (2, 10, 9):
        write_bundle(tmp_path, "m", version)
    write_bundle(tmp_path, "m", 11, artifacts=(Artifact(backend="fake", dtype="float32"),))
    found = newest_bundle(tmp_path, "m", "openvino")
    assert found
    assert found.key == ("m", 10)


@pytest.mark.parametrize(("name", "backend"), [("other", "openvino"), ("m", "neuronx")])
def test_without_a_bundle_for_the_back_end_there_is_no_newest(tmp_path: Path, name: str, backend: str) -> None:
    write_bundle(tmp_path, "m", 1)
    assert newest_bundle(tmp_path, name, backend) is None


def test_what_versions_share_is_on_disk_once_and_a_damaged_file_is_not_shared(tmp_path: Path) -> None:
    first, second = (write_bundle(tmp_path, "m", version) for version in (1, 2))
    name = "artifacts/openvino/model.bin"
    assert (first / name).stat().st_ino == (second / name).stat().st_ino
    for bundle in (first, second):
        read_bundle(bundle).files.check()
    (first / name).unlink()
    (first / name).write_bytes(bytes(256))
    (second / name).unlink()
    third = write_bundle(tmp_path, "m", 3)
    read_bundle(third).files.check()
    assert (third / name).stat().st_nlink == 1
