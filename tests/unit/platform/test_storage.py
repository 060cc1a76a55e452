"""platform/storage.py: objects by URI, in files and in S3."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronpipe.platform.storage import ObjectUri, Storage, StorageError, parse_below
from tests.servers.s3 import running_s3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    with running_s3(monkeypatch) as objects:
        yield objects


def test_an_object_of_s3_is_what_was_written(bucket: dict[str, bytes]) -> None:
    storage, uri = Storage(), ObjectUri.parse("s3://bucket/day/1.jsonl")
    storage.write(uri, b"one")
    assert bucket == {"day/1.jsonl": b"one"}
    assert storage.read(uri, 3) == b"one"


def test_errors_of_s3_say_whether_trying_again_helps(bucket: dict[str, bytes]) -> None:
    bucket["large"] = b"12345"
    storage = Storage()
    for text, problem in {
        "s3://bucket/none": "is not there",
        "s3://secret/key": "access is denied",
        "s3://bucket/large": "is larger than 4 bytes, the limit",
    }.items():
        with pytest.raises(StorageError, match=problem) as caught:
            storage.read(ObjectUri.parse(text), 4)
        assert caught.value.is_lasting


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_an_object_is_read_and_written_in_pieces(kind: str, bucket: dict[str, bytes], tmp_path: Path) -> None:
    storage = Storage()
    uri = ObjectUri.parse("s3://bucket/large" if kind == "s3" else f"file://{tmp_path}/large")
    content = b"".join(b"line %d\n" % number for number in range(300_000))
    with tempfile.TemporaryFile() as file:
        file.write(content)
        for _ in range(2):  # as after a fault
            storage.write(uri, file)
    with storage.open(uri, len(content)) as opened:
        assert opened.readline() == b"line 0\n"
        assert b"line 0\n" + opened.read() == content
    with pytest.raises(StorageError, match="the limit"):
        storage.open(uri, len(content) - 1)


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(bucket: dict[str, bytes], tmp_path: Path) -> None:
    storage = Storage()
    for text in ("s3://bucket/a", f"file://{tmp_path}/a"):
        uri = ObjectUri.parse(text)
        storage.write(uri, b"a" * (3 << 20))
        with storage.open(uri, 4 << 20) as opened:
            assert opened.read(1) == b"a"
            storage.write(uri, b"b" * (3 << 20))
            assert set(opened.read()) == {ord("a")}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    storage, uri = Storage(), ObjectUri.parse(f"file://{tmp_path}/new/out.jsonl")
    storage.write(uri, b"first")
    storage.write(uri, b"second")
    assert storage.read(uri, 6) == b"second"
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.jsonl"]


def test_a_file_that_is_missing_or_too_large_is_no_file_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")  # which nothing writes to
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    storage = Storage()
    problems = {"none": "is not there", "large": "4 bytes, the limit"}
    for name in ("", "pipe", "zeros", "loop", "x" * 300):
        problems[name] = "cannot be used: it is no file"
    for name, problem in problems.items():
        with pytest.raises(StorageError, match=problem) as caught:
            storage.read(ObjectUri.parse(f"file://{tmp_path}/{name}"), 4)
        assert caught.value.is_lasting


@pytest.mark.parametrize("name", ["file/out", "file/folder/out"])
def test_an_output_into_what_is_no_folder_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be used: it is no file, or access is denied") as caught:
        Storage().write(ObjectUri.parse(f"file://{tmp_path}/{name}"), b"x")
    assert caught.value.is_lasting
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("number", "is_lasting"), [(errno.EROFS, True), (errno.ENOSPC, False), (errno.EIO, False)])
def test_a_file_system_that_is_mounted_to_be_read_takes_no_output_later(
    number: int, is_lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("neuronpipe.platform.storage.replace_file", fail)
    with pytest.raises(StorageError) as caught:
        Storage().write(ObjectUri.parse(f"file://{tmp_path}/out"), b"x")
    assert caught.value.is_lasting == is_lasting


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://x/y", "must begin with s3:// or file://"),
        ("/etc/passwd", "must begin with"),
        ("file://host/x", "absolute path"),
        ("s3:///key", "name a bucket"),
        ("file:///data/../etc/passwd", r"no steps \. and \.\."),
        ("file:///data/%2e%2e/etc/passwd", r"no steps \. and \.\."),
        ("s3://b/k?versionId=1", "no \\?"),
        ("s3://other/a", "must be below s3://b/in/ or file:///data"),
        ("s3://b/inside", "must be below"),
        ("file:///database/x", "must be below"),
        ("s3://b/in/", "must be below"),
    ],
)
def test_a_uri_stays_where_it_may_point(text: str, problem: str) -> None:
    folders = [ObjectUri.parse("s3://b/in/"), ObjectUri.parse("file:///data")]
    with pytest.raises(ValueError, match=problem):
        parse_below(text, folders)


def test_what_is_below_a_folder_may_be_named() -> None:
    folders = [ObjectUri.parse("s3://b"), ObjectUri.parse("file:///data")]
    expected = ["s3://b/k/1", "file:///data/a b"]
    assert [str(parse_below(text, folders)) for text in ("s3://b/k/1", "file:///data/a%20b")] == expected
