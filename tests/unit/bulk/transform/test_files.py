"""bulk/transform/files.py and files.py over S3: a bucket holds what a folder would."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronpipe.bulk.transform.files import Folder, find_inputs, mark_of, open_folder, open_input, write_file
from neuronpipe.bulk.transform.shards import DoneShard, ShardManifest
from neuronpipe.core.errors import SetupError
from tests.servers.s3 import running_s3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    with running_s3(monkeypatch) as objects:
        yield objects


@pytest.fixture(params=["path", "bucket"])
def folder(request: pytest.FixtureRequest, bucket: dict[str, bytes], tmp_path: Path) -> Folder:
    return open_folder("s3://bucket/runs/a" if request.param == "bucket" else str(tmp_path / "runs" / "a"))


def _shard(number: int) -> DoneShard:
    return DoneShard(number, f"part-{number:05d}.jsonl", 4, "rows.jsonl", 0, 1, 0, 3, 0, 4)


def test_a_folder_has_what_was_completed_in_it(folder: Folder) -> None:
    with folder.locked():
        assert folder.read("_run.json") is None
        write_file(folder, "_run.json", b"{}")
        write_file(folder, "_shards/1", b"one")
        broken = folder.create("_shards/2")
        broken.file.write(b"two")
        broken.discard()
        assert folder.read("_run.json") == b"{}"
        assert folder.names("_shards") == ["_shards/1"]
        assert folder.sizes(["_run.json", "none"]) == {"_run.json": 2}


def test_a_shard_is_done_where_its_results_are_there(folder: Folder) -> None:
    manifest = ShardManifest(folder)
    with folder.locked():
        for number in (1, 0, 2):
            manifest.add(_shard(number))
        write_file(folder, "part-00000.jsonl", b"{}{}")
        write_file(folder, "part-00001.jsonl", b"{}")  # of another size than its line says
        assert manifest.done() == [_shard(0)]
        manifest.begin("a", {"task": "x"})
        manifest.begin("a", {"task": "x"})
        with pytest.raises(SetupError, match="differs in task"):
            manifest.begin("b", {"task": "y"})


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"3", b'{"number": 0}'])
def test_a_damaged_listing_is_done_again_and_a_damaged_run_is_told(folder: Folder, damaged: bytes) -> None:
    manifest = ShardManifest(folder)
    with folder.locked():
        manifest.add(_shard(0))
        write_file(folder, "part-00000.jsonl", b"{}{}")
        write_file(folder, "_shards/00001.json", damaged)
        assert manifest.done() == [_shard(0)]
        write_file(folder, "_run.json", damaged)
        with pytest.raises(SetupError, match=r"its _run\.json is damaged|differs in task"):
            manifest.begin("a", {"task": "x"})


def test_rows_are_read_from_a_bucket(bucket: dict[str, bytes]) -> None:
    bucket |= {"in/a.jsonl": b"{}\n", "in/b.jsonl": b"[]\n", "in/notes.txt": b"", "in/deep/c.jsonl": b""}
    assert find_inputs(["s3://bucket/in/[ab].jsonl"]) == ["s3://bucket/in/a.jsonl", "s3://bucket/in/b.jsonl"]
    assert find_inputs(["s3://bucket/in/b.jsonl"]) == ["s3://bucket/in/b.jsonl"]
    assert "s3://bucket/in/notes.txt" not in find_inputs(["s3://bucket/in/"])
    with open_input("s3://bucket/in/b.jsonl") as opened:
        assert opened.read() == b"[]\n"
    with pytest.raises(SetupError, match="no such file"):
        find_inputs(["s3://bucket/out/"])
    with pytest.raises(SetupError, match=r"s3://bucket/gone\.jsonl: is not there"):
        open_input("s3://bucket/gone.jsonl")


def test_a_mark_changes_with_a_file(bucket: dict[str, bytes], tmp_path: Path) -> None:
    def marks() -> tuple[str, str]:
        return mark_of(str(tmp_path / "a.jsonl")), mark_of("s3://bucket/a.jsonl")

    def write(content: bytes) -> None:
        (tmp_path / "a.jsonl").write_bytes(content)
        bucket["a.jsonl"] = content

    write(b"{}\n")
    before = marks()
    assert marks() == before
    write(b"[]\n\n")
    assert not set(marks()) & set(before)
