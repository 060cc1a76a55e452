"""A local folder with the versions of a repository in a bucket. Each version is fetched once for all processes of a
machine.

A file appears in its version's folder only when it is complete and verified. Until then it grows in `.fetching`, where
the next attempt of any process continues it. A process that uses a version holds a shared lock on the version's folder,
and the lock ends with the process. Versions that no process holds may be deleted to make room, the least recently used
first.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.bundles.bucket_repository import BucketRepository
from neuronpipe.bundles.folder_repository import FolderRepository, LiveRepository
from neuronpipe.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE, BundleFiles, Manifest, file_sha256
from neuronpipe.bundles.registry import REGISTRY_FILE, Registry
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import replace_file, reporting_os_errors
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_warning

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys

_FETCHING = ".fetching"
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Size of one request. A broken connection loses at most this many bytes.
_RANGE_BYTES = 8 << 20
_LOCK_LOOK_S = 0.1


class BundleCache:
    """Fetches versions into the cache.

    `fetched`: the share of the bytes that the cache contains, from 0 to 1, for each version that is being fetched.
    Methods block. They raise SetupError if a version cannot be fetched, and RefusedBundle for a damaged version.
    """

    def __init__(
        self,
        folder: Path,
        repository: BucketRepository,
        max_bytes: int,
        trusted: "TrustedKeys | None" = None,
        *,
        with_artifacts: bool = True,
    ) -> None:
        """`folder`: for this repository alone. `with_artifacts`: artefacts, which only executors load, come as well."""
        self.folder = folder
        self.fetched: dict[ModelKey, float] = {}
        self._repository = repository
        self._max_bytes = max_bytes
        self._with_artifacts = with_artifacts
        self._trusted = trusted
        self._held: dict[ModelKey, int] = {}
        self._is_ending = threading.Event()
        with self._writing():
            (folder / _FETCHING).mkdir(parents=True, exist_ok=True, mode=0o700)

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """Reads the manifest of a version. The other files need not be in the cache."""
        with self._writing():
            self._fetch_manifest(key, digest)
        return read_bundle(self._path(key), self._trusted, is_whole=False)

    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """Fetches all files of a version that this process needs, and keeps them until the version is released."""
        for _ in range(2):  # another process may delete the version in between
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
        if (descriptor := self._held.pop(key, None)) is not None:
            os.close(descriptor)

    def end(self) -> None:
        """Makes threads that wait or fetch give up with a SetupError. The fetched bytes stay for the next attempt."""
        self._is_ending.set()

    def _path(self, key: ModelKey) -> Path:
        return self.folder / key.name / str(key.version)

    def _fetch_manifest(self, key: ModelKey, digest: str) -> None:
        path = self._path(key)
        present = _sha256(path / MANIFEST_FILE)
        if present == digest:
            if self._trusted is None or (path / SIGNATURE_FILE).is_file():
                return
        elif present:  # the cached version was approved with another digest
            with self._locked():
                if _sha256(path / MANIFEST_FILE) == present:  # no other process has deleted the version
                    _delete(path)
        written = self._repository.manifest(key)
        if sha256(written).hexdigest() != digest:
            raise RefusedBundle(
                f"{self._repository.uri}: {key.name}/{key.version} has the digest {sha256(written).hexdigest()[:16]}, "
                f"the registry has {digest[:16]}: it is not the bundle that was approved"
            )
        signature = self._repository.signature(key) if self._trusted is not None else None
        if self._trusted is not None:
            self._trusted.verify_signature(f"{self._repository.uri}: {key.name}/{key.version}", written, signature)
        _check_names(Manifest.parse(written, path / MANIFEST_FILE), path)
        path.mkdir(parents=True, exist_ok=True)
        if signature is not None:
            replace_file(path / SIGNATURE_FILE, signature, unfinished_in=self.folder / _FETCHING)
        replace_file(path / MANIFEST_FILE, written, unfinished_in=self.folder / _FETCHING)

    def _complete(self, key: ModelKey, bundle: Bundle) -> None:
        needed = bundle.manifest.files
        if not self._with_artifacts:
            loaded = {name for artifact in bundle.manifest.artifacts for name in artifact.files}
            needed = {name: digest for name, digest in needed.items() if name not in loaded}
        if not self._missing(bundle, needed):
            return
        with self._locked():
            missing = self._missing(bundle, needed)  # another process may have fetched some
            missing = [name for name in missing if not self._link(bundle.folder / name, needed[name])]
            objects = {name: self._repository.find(key, name, needed[name]) for name in missing}
            total = sum(size for _, size in objects.values())
            partial = {needed[name] for name in missing}
            self._make_room(total, partial)
            done, began_s = 0, time.monotonic()
            for name, (place, size) in objects.items():
                for received in self._fetch(bundle.folder / name, needed[name], place, size):
                    self.fetched[key] = (done + received) / (total or 1)
                done += size
            if objects:
                seconds = round(time.monotonic() - began_s, 3)
                log("version fetched", model=key.name, version=key.version, bytes=total, seconds=seconds)

    def _missing(self, bundle: Bundle, needed: Mapping[str, str]) -> list[str]:
        files, missing = BundleFiles(bundle.folder, needed), []
        for name in needed:
            try:
                files.verify(name)
            except RefusedBundle:
                missing.append(name)
        return missing

    def _link(self, target: Path, digest: str) -> bool:
        """Links a file from another version that contains the same file. Returns whether there is such a version."""
        for manifest in self.folder.glob(f"*/*/{MANIFEST_FILE}"):
            with contextlib.suppress(OSError, SetupError):
                held = Manifest.read(manifest).files
                for name in (name for name, held_digest in held.items() if held_digest == digest):
                    source = manifest.parent / name
                    if source != target and _sha256(source) == digest:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.unlink(missing_ok=True)
                        os.link(source, target)
                        return True
        return False

    def _fetch(self, target: Path, digest: str, place: str, size: int) -> Iterator[int]:
        """Fetches a file from the byte at which the last attempt ended. Yields the number of bytes that arrived."""
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
            if begun:  # the bytes of the last attempt may be the damaged part
                yield from self._fetch(target, digest, place, size)
                return
            raise RefusedBundle(
                f"{self._repository.uri}: {place}: is damaged (its sha256 is not the manifest's); delete this object, "
                "and push the bundle again"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)

    def _make_room(self, needed: int, partial: set[str]) -> None:
        """Deletes unused versions, the least recently used first, until there is room. The caller holds the lock."""
        begun = (self.folder / _FETCHING / digest for digest in partial)
        here = sum(path.stat().st_size for path in begun if path.exists())
        if self._used() + needed - here <= self._max_bytes:
            return
        for unfinished in (self.folder / _FETCHING).iterdir():
            if unfinished.name not in partial and _DIGEST.fullmatch(unfinished.name):
                unfinished.unlink()
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
        """Returns the bytes of all files. A file with several names counts once."""
        statuses = [path.lstat() for path in self.folder.rglob("*") if path.is_file()]
        return sum({status.st_ino: status.st_size for status in statuses}.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes from fetching and deleting until the block ends."""
        descriptor = os.open(self.folder / _FETCHING, os.O_RDONLY | os.O_DIRECTORY)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if self._is_ending.wait(_LOCK_LOOK_S):
                    raise SetupError(f"{self.folder}: not waited for, as the process ends")
            yield
        finally:
            os.close(descriptor)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return reporting_os_errors(f"--repository-cache {self.folder}: cannot be written to")


def _check_names(manifest: Manifest, path: Path) -> None:
    """Raises RefusedBundle if the manifest names a path that cannot be a file of a bundle."""
    for name, digest in manifest.files.items():
        is_outside = Path(name).is_absolute() or ".." in Path(name).parts
        if is_outside or not _DIGEST.fullmatch(digest) or name in ("", MANIFEST_FILE, SIGNATURE_FILE):
            raise RefusedBundle(f"{path}: its manifest names {name!r}, which cannot be a file of a bundle")


def _shared_lock(folder: Path) -> int | None:
    """Opens a folder with a shared lock. Returns the descriptor, or None if another process is deleting the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(FileNotFoundError):
        if _try_lock(descriptor, fcntl.LOCK_SH) and folder.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def _delete_unused(folder: Path) -> bool:
    """Deletes a version that no process holds. Returns whether the version was deleted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if is_unused := _try_lock(descriptor, fcntl.LOCK_EX):
            _delete(folder)
        return is_unused
    finally:
        os.close(descriptor)


def _delete(folder: Path) -> None:
    """Deletes a folder at once for other processes, which see the whole folder or none."""
    gone = Path(tempfile.mkdtemp(prefix=".deleted.", dir=folder.parent))
    folder.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError:
        return ""


class BucketSource(BundleCache, LiveRepository):
    """A repository in a bucket. It keeps bundles and the last valid registry on disk, so that a service can start while
    the bucket is unavailable.
    """

    def __init__(
        self,
        repository: BucketRepository,
        cache: Path,
        max_bytes: int,
        trusted: "TrustedKeys | None" = None,
        *,
        with_artifacts: bool = True,
    ) -> None:
        """`cache`: the folder for the caches of all buckets. Raises SetupError if there is no registry."""
        # A bucket of the same name at another endpoint has another folder.
        place = sha256(f"{repository.endpoint} {repository.uri}".encode()).hexdigest()[:16]
        super().__init__(cache.expanduser() / place, repository, max_bytes, trusted, with_artifacts=with_artifacts)
        # Without retries, because the next look is the next attempt.
        self._watched_repository = BucketRepository(repository.uri, repository.endpoint, retries=0)
        self._kept = self.folder / REGISTRY_FILE
        self.fixed = {}
        self.problem = ""
        self._etag = ""
        try:
            self.registry = self._read_changed() or Registry()
        except SetupError as error:
            self.registry = FolderRepository(self.folder).read_registry()
            if not self.registry.revision:
                raise SetupError(
                    f"{error}; a repository in a bucket needs a registry: `neuronpipe bundle push --approve` makes it"
                ) from error
            self._set_problem(str(error))

    def look(self) -> None:
        try:
            changed = self._read_changed()
        except SetupError as error:
            self._set_problem(str(error))
            return
        if self.problem:
            log("the registry can be read again", repository=self._watched_repository.uri)
        self.problem = ""
        if changed:
            self.registry = changed

    def _read_changed(self) -> Registry | None:
        """Reads the registry, or returns None if it has not changed. Raises SetupError."""
        changed = self._watched_repository.read_registry_if_changed(self._etag)
        if changed is None:
            return None
        registry, self._etag = changed
        try:
            with self._writing():
                replace_file(self._kept, registry.model_dump_json().encode())
        except SetupError as error:
            log_warning("the registry cannot be kept for the next start", problem=str(error))
        return registry

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            log_warning("the registry cannot be read; what it said before stays", problem=problem)
        self.problem = problem
