"""bundles/bucket_repository.py and bundle_cache.py: a repository in a bucket, and what a machine keeps of it."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bundles import bucket_repository as bucket_module
from neuronpipe.bundles import bundle_cache
from neuronpipe.bundles.bucket_repository import BucketRepository
from neuronpipe.bundles.bundle_cache import BucketSource, BundleCache
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.bundles.signing import SigningKey, TrustedKeys, create_key
from neuronpipe.bundles.writing import sign_bundle
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.items import ModelKey
from tests.servers.s3 import running_s3
from tests.unit.bundles.written import write_bundle

_SIGNED = Signed("ann")
_URI = "s3://bucket/models"
_BIN = "artifacts/openvino/model.bin"
_M1, _M2 = ModelKey("m", 1), ModelKey("m", 2)
_LIMIT = 1 << 20


class _Bucket:
    """A bucket with the versions 1 and 2 of a model, which differ in their manifests only."""

    def __init__(self, folder: Path, objects: dict[str, bytes], requests: Counter[str]) -> None:
        self.objects = objects
        self.requests = requests
        self.breaks: set[tuple[str, int]] = set()  # method and key, and the number of the request
        self.look_on: Callable[[str, str], None] = lambda method, key: None
        self.cache = folder / "cache"
        self.bundles: list[Bundle] = []
        self.repository: BucketRepository

    def open_cache(self, *, max_bytes: int = _LIMIT, **options: object) -> BundleCache:
        return BundleCache(self.cache, self.repository, max_bytes, **options)  # type: ignore[arg-type]

    def blob(self, name: str) -> str:
        return f"models/.blobs/sha256/{self.bundles[0].files.digests[name]}"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Bucket]:
    requests = Counter[str]()

    def look_on(method: str, key: str) -> None:
        requests[f"{method} {key}"] += 1
        if (f"{method} {key}", requests[f"{method} {key}"]) in made.breaks:
            raise ConnectionResetError
        made.look_on(method, key)

    with running_s3(monkeypatch, look_on) as objects:
        made = _Bucket(tmp_path, objects, requests)
        made.repository = BucketRepository(_URI, retries=0)
        for version in (1, 2):
            made.bundles.append(read_bundle(write_bundle(tmp_path / "compiled", "m", version)))
            made.repository.push(made.bundles[-1], lambda line: None)
        requests.clear()
        yield made


def test_what_versions_share_is_in_the_bucket_once(bucket: _Bucket) -> None:
    manifests = {"models/m/1/manifest.json", "models/m/2/manifest.json"}
    assert set(bucket.objects) == manifests | set(map(bucket.blob, bucket.bundles[0].files.digests))
    assert [bundle.digest for bundle in bucket.repository.bundles()] == [bundle.digest for bundle in bucket.bundles]


def test_a_version_that_is_pushed_twice_is_there_once_and_none_takes_its_place(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.repository.push(bucket.bundles[0], lambda line: None)
    changed = read_bundle(write_bundle(tmp_path / "other", "m", 1, cache_results=True))
    with pytest.raises(SetupError, match="m/1: is there with another content; versions do not change"):
        bucket.repository.push(changed, lambda line: None)
    assert bucket.repository.bundle(_M1).digest == bucket.bundles[0].digest


def test_no_change_of_writers_at_once_is_lost(bucket: _Bucket) -> None:
    bucket.repository.change_registry(lambda now: now.approve(bucket.bundles[0], _SIGNED), _SIGNED)

    def name_five(letter: str) -> None:
        writer = BucketRepository(_URI)
        for number in range(5):
            alias = f"{letter}{number}"
            writer.change_registry(lambda now, alias=alias: now.alias("m", alias, 1, _SIGNED), _SIGNED)  # type: ignore[misc]

    writers = [threading.Thread(target=name_five, args=(letter,)) for letter in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = bucket.repository.read_registry()
    assert set(found.models["m"].aliases) == {"stable", *(f"{a}{n}" for a in "abc" for n in range(5))}
    assert bucket.requests["PUT models/registry.json"] > 15, "no writer was overtaken"


def test_files_of_no_version_are_deleted_and_no_others(bucket: _Bucket) -> None:
    before = dict(bucket.objects)
    for name in ("a" * 64, "b" * 64):
        bucket.objects[f"models/.blobs/sha256/{name}"] = b"left"
    bucket.objects["models/other"] = bucket.objects["another/.blobs/sha256/c"] = b"not ours"
    left = [f".blobs/sha256/{name}" for name in ("a" * 64, "b" * 64)]
    for deletes in (False, True):
        found = bucket.repository.collect_garbage(3600, deletes=deletes)
        assert [(blob.name, blob.size) for blob in found] == [(name, 4) for name in left]
    assert bucket.objects == before | {"models/other": b"not ours", "another/.blobs/sha256/c": b"not ours"}
    del bucket.objects["models/m/1/manifest.json"]
    assert bucket.repository.collect_garbage(0, deletes=True) == []  # version 2 has the same files
    del bucket.objects["models/m/2/manifest.json"]
    assert bucket.repository.collect_garbage(3600, deletes=True) == []  # they are younger
    assert len(bucket.repository.collect_garbage(0, deletes=True)) == len(bucket.bundles[0].files.digests)
    assert bucket.objects.keys() == {"models/other", "another/.blobs/sha256/c"}


def test_a_manifest_that_cannot_be_read_has_nothing_deleted(bucket: _Bucket) -> None:
    before = dict(bucket.objects)
    bucket.objects["models/.blobs/sha256/left"] = b"left"
    bucket.objects["models/m/1/manifest.json"] = b"{"
    with pytest.raises(SetupError, match=r"m/1/manifest\.json"):
        bucket.repository.collect_garbage(0, deletes=True)
    assert bucket.objects.keys() == before.keys() | {"models/.blobs/sha256/left"}  # and no sign of a collector


def test_a_push_beside_a_collector_loses_no_file(bucket: _Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector has listed the objects before the manifest comes, and deletes a file when it is there."""
    monkeypatch.setattr(bucket_module, "_COLLECTING_LOOK_S", 0.01)
    for version in (1, 2):
        del bucket.objects[f"models/m/{version}/manifest.json"]
    told: list[str] = []
    pushing = threading.Thread(target=lambda: BucketRepository(_URI).push(bucket.bundles[0], told.append))

    def push_when_about_to_delete(method: str, key: str) -> None:
        if method == "DELETE" and key.startswith("models/.blobs/sha256/") and not pushing.ident:
            pushing.start()
            while not any(line.startswith("waits") for line in told):
                time.sleep(0.01)

    bucket.look_on = push_when_about_to_delete
    assert bucket.repository.collect_garbage(0, deletes=True)
    pushing.join(30)
    assert not pushing.is_alive()
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest).files.check()


def test_one_process_collects_garbage_at_a_time(bucket: _Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.objects["models/.blobs/collecting"] = b""
    with pytest.raises(SetupError, match=r"\.blobs/collecting: is there, so another process collects garbage"):
        bucket.repository.collect_garbage(0, deletes=True)
    assert "models/.blobs/collecting" in bucket.objects  # it is the other's
    monkeypatch.setattr(bucket_module, "_COLLECTING_LIMIT_S", 0.0)
    monkeypatch.setattr(bucket_module, "_COLLECTING_LOOK_S", 0.01)
    with pytest.raises(SetupError, match="if that one was killed, delete the object and try again"):
        bucket.repository.push(bucket.bundles[0], lambda line: None)


def test_a_version_is_fetched_once_and_what_it_shares_with_another_is_not_fetched_again(bucket: _Bucket) -> None:
    for _ in range(2):  # of two processes
        bundle = bucket.open_cache().hold(_M1, bucket.bundles[0].digest)
        bundle.files.check()
        assert bucket.requests[f"GET {bucket.blob(_BIN)}"] == 1
    second = bucket.open_cache().hold(_M2, bucket.bundles[1].digest)
    second.files.check()
    assert bucket.requests[f"GET {bucket.blob(_BIN)}"] == 1
    assert (second.folder / _BIN).stat().st_ino == (bundle.folder / _BIN).stat().st_ino


def test_a_bundle_that_was_copied_into_the_bucket_is_fetched(bucket: _Bucket) -> None:
    for name in bucket.bundles[0].files.digests:
        bucket.objects[f"models/m/1/{name}"] = bucket.objects.pop(bucket.blob(name))
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest).files.check()


def test_a_process_that_loads_no_artifacts_does_not_fetch_them(bucket: _Bucket) -> None:
    bundle = bucket.open_cache(with_artifacts=False).hold(_M1, bucket.bundles[0].digest)
    assert bundle.tokenizer_json() == b"{}"
    assert not (bundle.folder / _BIN).exists()
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest).files.check()  # an executor beside it


def test_a_fetch_that_breaks_goes_on_where_it_was(bucket: _Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_cache, "_RANGE_BYTES", 100)  # of 256
    bucket.breaks = {(f"GET {bucket.blob(_BIN)}", 2)}
    cache = bucket.open_cache()
    with pytest.raises(SetupError, match="the object store does not answer as it should"):
        cache.hold(_M1, bucket.bundles[0].digest)
    assert not (bucket.cache / "m" / "1" / _BIN).exists()
    assert [path.stat().st_size for path in (bucket.cache / ".fetching").iterdir()] == [100]
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest).files.check()
    assert bucket.requests[f"GET {bucket.blob(_BIN)}"] == 4  # 100, broken, 100, 56


def test_a_part_that_was_damaged_here_is_fetched_anew(bucket: _Bucket) -> None:
    cache = bucket.open_cache()
    (bucket.cache / ".fetching" / bucket.bundles[0].files.digests[_BIN]).write_bytes(b"damaged")
    cache.hold(_M1, bucket.bundles[0].digest).files.check()


@pytest.mark.parametrize("damage", [b"", b"\0" * 256])
def test_a_damaged_object_is_refused_and_never_used(bucket: _Bucket, damage: bytes) -> None:
    whole = bucket.objects[bucket.blob(_BIN)]
    bucket.objects[bucket.blob(_BIN)] = damage
    cache = bucket.open_cache()
    with pytest.raises(RefusedBundle, match=r"is damaged \(its sha256 is not the manifest's\)"):
        cache.hold(_M1, bucket.bundles[0].digest)
    assert not (bucket.cache / "m" / "1" / _BIN).exists()
    bucket.objects[bucket.blob(_BIN)] = whole
    cache.hold(_M1, bucket.bundles[0].digest).files.check()


def test_a_file_that_was_damaged_in_the_cache_is_mended(bucket: _Bucket) -> None:
    bundle = bucket.open_cache().hold(_M1, bucket.bundles[0].digest)
    (bundle.folder / _BIN).write_bytes(b"damaged")
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest).files.check()


def test_a_manifest_that_is_not_the_one_approved_is_refused_before_its_files_are_fetched(bucket: _Bucket) -> None:
    with pytest.raises(RefusedBundle, match="it is not the bundle that was approved"):
        bucket.open_cache().hold(_M1, "0" * 64)
    assert not any(request.startswith("GET models/.blobs") for request in bucket.requests)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "manifest.json"])
def test_a_manifest_that_names_what_is_outside_is_refused(bucket: _Bucket, name: str) -> None:
    written = bucket.objects["models/m/1/manifest.json"].replace(b'"tokenizer.json"', f'"{name}"'.encode())
    bucket.objects["models/m/1/manifest.json"] = written
    with pytest.raises(RefusedBundle, match="which cannot be a file of a bundle"):
        bucket.open_cache().hold(_M1, sha256(written).hexdigest())


def test_the_least_recently_used_version_makes_room_unless_it_is_held(bucket: _Bucket, tmp_path: Path) -> None:
    third = read_bundle(_write_larger(tmp_path / "compiled"))
    bucket.repository.push(third, lambda line: None)
    sizes = [
        sum(path.stat().st_size for path in bundle.folder.rglob("*") if path.is_file())
        for bundle in (*bucket.bundles, third)
    ]
    room = sizes[0] + sizes[2] + 100
    cache = bucket.open_cache(max_bytes=room)
    cache.hold(_M1, bucket.bundles[0].digest)
    second = bucket.open_cache(max_bytes=room)
    second.hold(_M2, bucket.bundles[1].digest)
    problem = r"bytes to fetch beside .* in use are more than .* the limit \(--repository-c"
    with pytest.raises(SetupError, match=problem):
        bucket.open_cache(max_bytes=sizes[2]).hold(ModelKey("m", 3), third.digest)
    assert {path.name for path in (bucket.cache / "m").iterdir()} >= {"1", "2"}
    cache.release(_M1)
    second.release(_M2)
    os.utime(bucket.cache / "m" / "1")  # the older one is used again
    bucket.open_cache(max_bytes=room).hold(ModelKey("m", 3), third.digest).files.check()
    assert {path.name for path in (bucket.cache / "m").iterdir()} == {"1", "3"}


def _write_larger(repository: Path, size: int = 3000) -> Path:
    from neuronpipe.bundles.writing import new_bundle, write_manifest
    from tests.unit.bundles.written import manifest, write_files

    with new_bundle(repository, "m", 3) as folder:
        write_files(folder)
        (folder / _BIN).write_bytes(b"3" * size)
        write_manifest(folder, manifest("m", 3))
    return repository / "m" / "3"


def test_who_waits_for_another_process_or_fetches_gives_up_when_the_process_ends(bucket: _Bucket) -> None:
    cache, holder = bucket.open_cache(), bucket.open_cache()
    with holder._locked():
        threading.Timer(0.2, cache.end).start()
        with pytest.raises(SetupError, match="as the process ends"):
            cache.hold(_M1, bucket.bundles[0].digest)


def _large(bucket: _Bucket, tmp_path: Path, size: int) -> Bundle:
    """A third version, which alone has a large file."""
    bundle = read_bundle(_write_larger(tmp_path / "compiled", size))
    bucket.repository.push(bundle, lambda line: None)
    bucket.requests.clear()
    return bundle


# Whole blocks of a file's buffer: what was received is in the file.
_RANGE = 1 << 14
_HOLD = """
import sys
from pathlib import Path
from neuronpipe.bundles import bundle_cache
from neuronpipe.bundles.bucket_repository import BucketRepository
from neuronpipe.core.items import ModelKey
bundle_cache._RANGE_BYTES = int(sys.argv[3])
cache = bundle_cache.BundleCache(Path(sys.argv[1]), BucketRepository("s3://bucket/models"), 1 << 20)
cache.hold(ModelKey("m", 3), sys.argv[2])
"""


def test_a_process_goes_on_with_what_one_that_was_killed_had_fetched(
    bucket: _Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_cache, "_RANGE_BYTES", _RANGE)
    third = _large(bucket, tmp_path, 3 * _RANGE)
    large = f"GET models/.blobs/sha256/{third.files.digests[_BIN]}"
    asked_twice, is_killed = threading.Event(), threading.Event()

    def hang(method: str, key: str) -> None:
        if f"{method} {key}" == large and bucket.requests[large] == 2:
            asked_twice.set()
            is_killed.wait(60)
            raise ConnectionResetError

    bucket.look_on = hang
    fetching = subprocess.Popen([sys.executable, "-c", _HOLD, str(bucket.cache), third.digest, str(_RANGE)])
    held: list[Bundle] = []
    waiting = threading.Thread(target=lambda: held.append(bucket.open_cache().hold(ModelKey("m", 3), third.digest)))
    try:
        assert asked_twice.wait(60)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "it fetches beside the other process"
        assert bucket.requests[large] == 2
    finally:
        fetching.kill()
        fetching.wait()
        is_killed.set()
    waiting.join(60)
    held[0].files.check()
    assert bucket.requests[large] == 4  # the first part, the one that was never answered, and the other two
    assert not [*(bucket.cache / ".fetching").iterdir()]


def test_processes_that_want_one_version_at_once_fetch_it_once(bucket: _Bucket, tmp_path: Path) -> None:
    third = _large(bucket, tmp_path, 3 * _RANGE)
    commands = [[sys.executable, "-c", _HOLD, str(bucket.cache), third.digest, str(_RANGE)] for _ in range(3)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    read_bundle(bucket.cache / "m" / "3").files.check()
    assert bucket.requests[f"GET models/.blobs/sha256/{third.files.digests[_BIN]}"] == 3


@pytest.mark.parametrize("before", ["_shared_lock", "_try_lock"])  # the folder is opened
def test_a_version_that_is_deleted_while_a_process_takes_hold_of_it_is_fetched_again(
    bucket: _Bucket, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deletes, original = [True], getattr(bundle_cache, before)

    def delete_first(*arguments: Any) -> Any:
        if fcntl.LOCK_EX not in arguments and deletes.pop():
            bundle_cache._delete(bucket.cache / "m" / "1")
        return original(*arguments)

    monkeypatch.setattr(bundle_cache, before, delete_first)
    cache = bucket.open_cache()
    deletes[:] = [False, True]
    bundle = cache.hold(_M1, bucket.bundles[0].digest)
    bundle.files.check()
    assert bucket.requests["GET models/m/1/manifest.json"] == 2
    assert not bundle_cache._delete_unused(bundle.folder), "the lock is on the folder that is gone"
    cache.release(_M1)
    deletes[:] = [True, True]
    with pytest.raises(SetupError, match="m/1: another process deletes it at this time; it is tried again"):
        cache.hold(_M1, bucket.bundles[0].digest)


def test_a_version_is_not_used_while_another_process_deletes_it(bucket: _Bucket) -> None:
    cache = bucket.open_cache()
    folder = cache.describe(_M1, bucket.bundles[0].digest).folder
    deleting = os.open(folder, os.O_RDONLY)
    fcntl.flock(deleting, fcntl.LOCK_EX)
    with pytest.raises(SetupError, match="another process deletes it"):
        cache.hold(_M1, bucket.bundles[0].digest)
    os.close(deleting)
    cache.hold(_M1, bucket.bundles[0].digest).files.check()


def _replaced(bucket: _Bucket, tmp_path: Path) -> Bundle:
    """Version 1 with another content, which takes its place in the bucket."""
    changed = read_bundle(write_bundle(tmp_path / "other", "m", 1, cache_results=True))
    bucket.objects["models/m/1/manifest.json"] = (changed.folder / MANIFEST_FILE).read_bytes()
    return changed


def test_a_version_approved_with_another_content_replaces_the_old_one(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest)
    changed = _replaced(bucket, tmp_path)
    bundle = bucket.open_cache().hold(_M1, changed.digest)
    bundle.files.check()
    assert (bundle.digest, bundle.manifest.cache_results) == (changed.digest, True)


def test_a_version_that_another_process_has_replaced_meanwhile_is_not_deleted(
    bucket: _Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.open_cache().hold(_M1, bucket.bundles[0].digest)
    changed = _replaced(bucket, tmp_path)
    first, second = bucket.open_cache(), bucket.open_cache()
    locked = second._locked

    @contextlib.contextmanager
    def locked_later() -> Iterator[None]:
        monkeypatch.setattr(second, "_locked", locked)
        first.hold(_M1, changed.digest)
        with locked():
            yield

    monkeypatch.setattr(second, "_locked", locked_later)
    bundle = second.hold(_M1, changed.digest)
    second.release(_M1)
    bundle.files.check()
    assert not bundle_cache._delete_unused(bundle.folder), "the first process has it no more"


def test_a_process_that_ends_leaves_what_it_has_fetched_to_the_next(
    bucket: _Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_cache, "_RANGE_BYTES", _RANGE)
    third = _large(bucket, tmp_path, 3 * _RANGE)
    large = f"GET models/.blobs/sha256/{third.files.digests[_BIN]}"
    cache = bucket.open_cache()
    bucket.look_on = lambda method, key: cache.end() if f"{method} {key}" == large else None
    with pytest.raises(SetupError, match=r"artifacts/openvino/model\.bin: not fetched, as the process ends"):
        cache.hold(ModelKey("m", 3), third.digest)
    assert bucket.requests[large] == 1
    bucket.open_cache().hold(ModelKey("m", 3), third.digest).files.check()
    assert bucket.requests[large] == 3


def test_parts_that_nothing_wants_any_more_make_room(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.open_cache()
    left, foreign = bucket.cache / ".fetching" / ("a" * 64), bucket.cache / ".fetching" / "not-ours"
    left.write_bytes(b"x" * 4000)
    foreign.write_bytes(b"x")
    sizes = sum(path.stat().st_size for path in bucket.bundles[0].folder.rglob("*") if path.is_file())
    bucket.open_cache(max_bytes=sizes + 100).hold(_M1, bucket.bundles[0].digest).files.check()
    assert [left.exists(), foreign.exists()] == [False, True]


def test_the_signature_of_a_version_that_is_here_is_fetched_where_wanted(bucket: _Bucket, tmp_path: Path) -> None:
    create_key(tmp_path / "key", tmp_path / "public")
    signed = sign_bundle(bucket.bundles[0].folder, SigningKey.read(tmp_path / "key", "--key"))
    bucket.repository.push(signed, lambda line: None)
    assert bucket.open_cache().hold(_M1, signed.digest).signer == ""
    trusted = TrustedKeys.read(tmp_path / "public")
    assert bucket.open_cache(trusted=trusted).hold(_M1, signed.digest).signer == signed.signer


def test_trusted_keys_hold_for_what_is_fetched(bucket: _Bucket, tmp_path: Path) -> None:
    create_key(tmp_path / "key", tmp_path / "public")
    trusted = TrustedKeys.read(tmp_path / "public")
    with pytest.raises(RefusedBundle, match="is not signed"):
        bucket.open_cache(trusted=trusted).hold(_M1, bucket.bundles[0].digest)
    bundle = sign_bundle(bucket.bundles[0].folder, SigningKey.read(tmp_path / "key", "--key"))
    bucket.repository.push(bundle, lambda line: None)  # the same version, which has a signature now
    assert bucket.open_cache(trusted=trusted).hold(_M1, bundle.digest).signer == bundle.signer


def _approved(bucket: _Bucket) -> Registry:
    return bucket.repository.change_registry(lambda now: now.alias("m", "stable", 1, _SIGNED), _SIGNED)


def test_the_registry_is_read_again_only_when_it_has_changed(bucket: _Bucket, caplog: pytest.LogCaptureFixture) -> None:
    _approved(bucket)
    source = BucketSource(bucket.repository, bucket.cache, _LIMIT)
    first = source.registry
    source.look()
    assert source.registry is first
    bucket.repository.change_registry(lambda now: now.alias("m", "stable", 2, _SIGNED), _SIGNED)
    source.look()
    assert source.registry.models["m"].aliases == {"stable": 2}


@pytest.mark.parametrize("damage", ["vanished", "half-written", "denied"])
def test_an_unreadable_registry_changes_nothing_here_or_for_a_process_that_starts(bucket: _Bucket, damage: str) -> None:
    _approved(bucket)
    source = BucketSource(bucket.repository, bucket.cache, _LIMIT)
    written = bucket.objects.pop("models/registry.json")
    if damage == "half-written":
        bucket.objects["models/registry.json"] = written[:100]
    if damage == "denied":
        bucket.breaks = {("GET models/registry.json", number) for number in range(100)}
    source.look()
    assert source.problem
    assert source.registry.models["m"].aliases == {"stable": 1}
    begun = BucketSource(bucket.repository, bucket.cache, _LIMIT)
    assert (begun.registry.revision, bool(begun.problem)) == (source.registry.revision, True)
    bucket.breaks = set()
    bucket.objects["models/registry.json"] = written
    for follower in (source, begun):
        follower.look()
        assert follower.problem == ""


def test_a_bucket_without_a_registry_is_not_served(bucket: _Bucket) -> None:
    with pytest.raises(SetupError, match=r"registry.json: is not there; a repository in a bucket needs a registry"):
        BucketSource(bucket.repository, bucket.cache, _LIMIT)


def test_the_manifest_that_is_pushed_last_is_what_others_see(bucket: _Bucket, tmp_path: Path) -> None:
    third = read_bundle(_write_larger(tmp_path / "compiled"))
    bucket.breaks = {(f"PUT models/.blobs/sha256/{third.files.digests[_BIN]}", 1)}
    with pytest.raises(SetupError):
        bucket.repository.push(third, lambda line: None)
    assert f"models/m/3/{MANIFEST_FILE}" not in bucket.objects
    assert {bundle.key for bundle in bucket.repository.bundles()} == {("m", 1), ("m", 2)}
