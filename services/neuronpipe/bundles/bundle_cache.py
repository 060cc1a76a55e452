"""A local folder with the versions of a repository in a bucket, each fetched once for all processes of the machine.

A file is in its version's folder only when it is whole and verified; until then it grows in `.fetching`, where the next
attempt, of this process or of another, finds it. A process that uses a version holds a shared lock on its folder, which
ends with the process; what nobody holds may be deleted to make room, the least recently used first.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.bundles.bucket_repository import BucketRepository
from neuronpipe.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE, BundleFiles, Manifest, file_sha256
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import files_told, replace_file
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys

_FETCHING = ".fetching"
_DIGEST = re.compile(r"[0-9a-f]{64}")
# One request; a break costs no more than this.
_RANGE_BYTES = 8 << 20
_LOCK_LOOK_S = 0.1

# Which files of a bundle a process needs, by name.
Parts = Callable[[Manifest], Mapping[str, str]]


def all_parts(manifest: Manifest) -> Mapping[str, str]:
    """Every file."""
    return manifest.files


def parts_without_artifacts(manifest: Manifest) -> Mapping[str, str]:
    """Every file but those that executors load."""
    loaded = {name for artifact in manifest.artifacts for name in artifact.files}
    return {name: digest for name, digest in manifest.files.items() if name not in loaded}


class BundleCache:
    """Fetches versions. `fetched`: of each version that is being fetched, the share of its bytes that is here.

    Methods block, and raise SetupError where a version cannot be had, and RefusedBundle for a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        repository: BucketRepository,
        max_bytes: int,
        parts: Parts = all_parts,
        trusted: "TrustedKeys | None" = None,
    ) -> None:
        """`folder`: of this repository alone. `parts`: what this process needs of a version."""
        self.folder = folder
        self.fetched: dict[ModelKey, float] = {}
        self._repository = repository
        self._max_bytes = max_bytes
        self._parts = parts
        self._trusted = trusted
        self._held: dict[ModelKey, int] = {}
        self._is_ending = threading.Event()
        with self._writing():
            (folder / _FETCHING).mkdir(parents=True, exist_ok=True, mode=0o700)

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """A version by its manifest; its other files need not be here."""
        with self._writing():
            self._fetch_manifest(key, digest)
        return read_bundle(self._path(key), self._trusted, is_whole=False)

    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """A version with all files that this process needs. It stays until it is released."""
        for _ in range(2):  # it may be evicted in between
            bundle = self.describe(key, digest)
            with self._writing():
                if (descriptor := _shared_lock(bundle.folder)) is None:
                    continue
                try:
                    os.utime(descriptor)
                    self._complete(key, bundle)
                except BaseException:
                    os.close(descriptor)
                    raise
                finally:
                    self.fetched.pop(key, None)
            self._held[key] = descriptor
            return bundle
        raise SetupError(f"{self._path(key)}: another process deletes it at this time; it is tried again")

    def release(self, key: ModelKey) -> None:
        """The process does not use the version any more."""
        if (descriptor := self._held.pop(key, None)) is not None:
            os.close(descriptor)

    def end(self) -> None:
        """Makes whoever waits or fetches give up, with SetupError. What was fetched stays for the next time."""
        self._is_ending.set()

    def _path(self, key: ModelKey) -> Path:
        return self.folder / key.name / str(key.version)

    def _fetch_manifest(self, key: ModelKey, digest: str) -> None:
        path = self._path(key)
        present = _sha256(path / MANIFEST_FILE)
        if present == digest:
            if self._trusted is None or (path / SIGNATURE_FILE).is_file():
                return
        elif present:  # it was approved with another digest
            with self._locked():
                if _sha256(path / MANIFEST_FILE) == present:  # no other process has deleted it
                    _delete(path)
        written = self._repository.manifest(key)
        if sha256(written).hexdigest() != digest:
            raise RefusedBundle(
                f"{self._repository.uri}: {key.name}/{key.version} has the digest {sha256(written).hexdigest()[:16]}, "
                f"the registry has {digest[:16]}: it is not the bundle that was approved"
            )
        if self._trusted is not None:
            signature = self._repository.signature(key)
            self._trusted.verify_signature(f"{self._repository.uri}: {key.name}/{key.version}", written, signature)
        else:
            signature = None
        _check_names(Manifest.parse(written, path / MANIFEST_FILE), path)
        path.mkdir(parents=True, exist_ok=True)
        if signature is not None:
            replace_file(path / SIGNATURE_FILE, signature, unfinished_in=self.folder / _FETCHING)
        replace_file(path / MANIFEST_FILE, written, unfinished_in=self.folder / _FETCHING)

    def _complete(self, key: ModelKey, bundle: Bundle) -> None:
        """Fetches what is missing, or damaged."""
        needed = self._parts(bundle.manifest)
        if not self._missing(bundle, needed):
            return
        with self._locked():
            missing = self._missing(bundle, needed)  # another process may have fetched them
            missing = [name for name in missing if not self._link(bundle.folder / name, needed[name])]
            found = {name: self._repository.find(key, name, needed[name]) for name in missing}
            total = sum(size for _, size in found.values())
            partial = {needed[name] for name in missing}
            self._make_room(total, partial)
            done, began_s = 0, time.monotonic()
            for name, (place, size) in found.items():
                for received in self._fetch(bundle.folder / name, needed[name], place, size):
                    self.fetched[key] = (done + received) / (total or 1)
                done += size
            if found:
                log(
                    "version fetched",
                    model=key.name,
                    version=key.version,
                    bytes=total,
                    seconds=round(time.monotonic() - began_s, 3),
                )

    def _missing(self, bundle: Bundle, needed: Mapping[str, str]) -> list[str]:
        files, missing = BundleFiles(bundle.folder, needed), []
        for name in needed:
            try:
                files.verify(name)
            except RefusedBundle:
                missing.append(name)
        return missing

    def _link(self, target: Path, digest: str) -> bool:
        """Takes a file from another version that has it. Returns whether there is one."""
        for manifest in self.folder.glob(f"*/*/{MANIFEST_FILE}"):
            with contextlib.suppress(OSError, SetupError):
                held = Manifest.read(manifest).files
                for name in (name for name, one in held.items() if one == digest):
                    source = manifest.parent / name
                    if source != target and _sha256(source) == digest:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.unlink(missing_ok=True)
                        os.link(source, target)
                        return True
        return False

    def _fetch(self, target: Path, digest: str, place: str, size: int) -> Iterator[int]:
        """Fetches a file, from where the last attempt ended. Yields how many bytes are here."""
        partial = self.folder / _FETCHING / digest
        with partial.open("ab+") as file:
            file.seek(0)
            hashed = file_digest(file, sha256)
            received = begun = file.tell()
            while received < size:
                if self._is_ending.is_set():
                    raise SetupError(f"{target}: not fetched, as the process ends")
                chunk = self._repository.read_range(place, received, min(_RANGE_BYTES, size - received))
                file.write(chunk)
                hashed.update(chunk)
                received += len(chunk)
                yield received
            file.flush()
            os.fsync(file.fileno())
        if hashed.hexdigest() != digest:
            partial.unlink()
            if begun:  # the part that was here may be what is damaged
                yield from self._fetch(target, digest, place, size)
                return
            raise RefusedBundle(
                f"{self._repository.uri}: {place}: is damaged (its sha256 is not the manifest's); delete it, and push "
                "the bundle again"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)

    def _make_room(self, needed: int, partial: set[str]) -> None:
        """Deletes what nobody uses, the least recently used first, until there is room. The lock is held."""
        here = sum(_size(self.folder / _FETCHING / digest) for digest in partial)
        if self._used() + needed - here <= self._max_bytes:
            return
        for left in (self.folder / _FETCHING).iterdir():
            if left.name not in partial and _DIGEST.fullmatch(left.name):
                left.unlink()
        versions = [path.parent for path in self.folder.glob(f"*/*/{MANIFEST_FILE}")]
        for version in sorted(versions, key=lambda path: path.stat().st_mtime_ns):
            if self._used() + needed - here <= self._max_bytes:
                return
            if _delete_unused(version):
                log("version deleted from the cache", folder=str(version))
        if (used := self._used() - here) + needed > self._max_bytes:
            raise SetupError(
                f"{self.folder}: {needed:,} bytes to fetch beside {used:,} that are in use are more than "
                f"{self._max_bytes:,}, the limit (--repository-cache-bytes)"
            )

    def _used(self) -> int:
        """The bytes of all files; of those with several names once."""
        found = [path.lstat() for path in self.folder.rglob("*") if path.is_file()]
        return sum({one.st_ino: one.st_size for one in found}.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes from fetching and deleting."""
        descriptor = os.open(self.folder / _FETCHING, os.O_RDONLY | os.O_DIRECTORY)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if self._is_ending.wait(_LOCK_LOOK_S):
                    raise SetupError(f"{self.folder}: not waited for, as the process ends")
            yield
        finally:
            os.close(descriptor)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return files_told(f"--repository-cache {self.folder}: cannot be written to")


def _check_names(manifest: Manifest, path: Path) -> None:
    """Raises RefusedBundle for a manifest that names what is no file of a bundle."""
    for name, digest in manifest.files.items():
        is_outside = Path(name).is_absolute() or ".." in Path(name).parts
        if is_outside or not _DIGEST.fullmatch(digest) or name in ("", MANIFEST_FILE, SIGNATURE_FILE):
            raise RefusedBundle(f"{path}: its manifest names {name!r}, which cannot be a file of a bundle")


def _shared_lock(folder: Path) -> int | None:
    """A descriptor that holds a shared lock on a folder; None where another process deletes it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _try_lock(descriptor, fcntl.LOCK_SH) and _inode(folder) == os.fstat(descriptor).st_ino:
        return descriptor
    os.close(descriptor)
    return None


def _delete_unused(folder: Path) -> bool:
    """Deletes a version that no process holds. Returns whether it did."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            return False
        _delete(folder)
        return True
    finally:
        os.close(descriptor)


def _delete(folder: Path) -> None:
    """At once for others: under its name it is whole, or not there."""
    gone = Path(tempfile.mkdtemp(prefix=".deleted.", dir=folder.parent))
    folder.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha256(path: Path) -> str:
    """The digest of a file; empty where there is none."""
    try:
        return file_sha256(path)
    except OSError:
        return ""
