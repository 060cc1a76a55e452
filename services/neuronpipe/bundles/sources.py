"""Repositories, in a folder or in a bucket of S3: as processes load them, and as commands and gateways change them.

A process that loads from a bucket has a local cache.
"""

import contextlib
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from neuronpipe.bundles.bucket_repository import BucketRepository
from neuronpipe.bundles.bundle_cache import BundleCache, all_parts, parts_without_artifacts
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import REGISTRY_FILE, Operation, Registry, Signed
from neuronpipe.bundles.repository import (
    Bundle,
    bundle_folders,
    read_bundle,
    read_repository,
    read_trusted_keys,
)
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import files_told, read_file, replace_file
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.watched import Watched
from neuronpipe.platform.process.settings import ServerSettings, is_bucket

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


class FolderRepository:
    """A repository in a folder. Every method raises SetupError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_registry(self) -> Registry:
        """The registry; of revision 0 where there is none."""
        path = self._folder / REGISTRY_FILE
        with files_told(f"{path}: cannot be read"):
            try:
                path.stat()
            except FileNotFoundError:
                return Registry()
        return Registry.parse(read_file(path, str(path)), path)

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """Applies an operation to the registry as it is now, and writes the result. Returns it.

        The first operation on a repository without a registry writes down first what was served up to then, without
        the version `new`, which has just been made. Writers wait for each other, and readers see the old file or the
        new one. Raises also what the operation raises.
        """
        if (self._folder / MANIFEST_FILE).is_file():
            raise SetupError(
                f"{self._folder}: is a bundle; a registry is in a repository, the folder of its model's folder"
            )
        path = self._folder / REGISTRY_FILE
        with files_told(f"{path}: cannot be written"), _locked(self._folder):
            present = self.read_registry()
            if not present.revision:
                present = Registry.of_bundles([one for one in self.bundles() if one.key != new], signed)
            changed = operation(present)
            replace_file(path, changed.model_dump_json(indent=2).encode() + b"\n", mode=0o644)
        return changed

    def bundles(self) -> list[Bundle]:
        """Every version."""
        return read_repository(self._folder)

    def bundle(self, key: ModelKey) -> Bundle:
        """A version, as its manifest has it."""
        folder = self._folder / key.name / str(key.version)
        # A name is one folder: whoever asks over the network must not get out of the repository.
        is_name = Path(key.name).name == key.name and key.name != ".." and "\0" not in key.name
        with files_told(f"{folder}: cannot be read"):
            if not is_name or not folder.is_dir():
                raise SetupError(f"{folder}: no such bundle; `neuronpipe registry list` lists those that are there")
        return read_bundle(folder)

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """Raises also RefusedBundle for a bundle with files that are missing or damaged, or without the signature of
        one of the `trusted` keys.
        """
        read_bundle(bundle.folder, trusted).files.check()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other writers out. The lock is the folder's, so it leaves no file, and ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Bundles and their registry.
Repository: TypeAlias = FolderRepository | BucketRepository


def open_repository(place: str, endpoint: str = "") -> Repository:
    """The repository of a folder, or of s3://BUCKET/PREFIX. `endpoint`: URL of the object store. Raises SetupError."""
    return BucketRepository(place, endpoint) if is_bucket(place) else FolderRepository(Path(place))


def approve_version(repository: Repository, key: ModelKey, trusted_keys: Path | None, signed: Signed) -> Operation:
    """The operation that approves a version, whose files are checked now. Raises SetupError and RefusedBundle."""
    bundle = repository.bundle(key)
    repository.check(bundle, read_trusted_keys(trusted_keys))
    return lambda registry: registry.approve(bundle, signed)


def reject_version(repository: Repository, key: ModelKey, signed: Signed) -> Operation:
    """The operation that rejects a version. Raises SetupError for one that is not there."""
    bundle = repository.bundle(key)
    return lambda registry: registry.reject(bundle, signed)


class LiveRepository(ABC):
    """A repository as a process needs it, with its registry as it was when it could last be read.

    `registry`: of revision 0 where there is none. `problem`: why the registry as it is now is not used; empty while it
    is. `fixed`: what is served without a registry. `fetched`: the share that is here of each version that is being
    fetched, from 0 to 1.
    """

    registry: Registry
    problem: str
    fixed: Mapping[ModelKey, Bundle]
    fetched: dict[ModelKey, float]
    look_every_s = 1.0

    @property
    def desired(self) -> frozenset[ModelKey]:
        """The versions to have."""
        return frozenset(self.registry.desired if self.registry.revision else self.fixed)

    def bundles(self) -> list[Bundle]:
        """The versions to have, by their manifests, as far as they can be read."""
        found = []
        for key in sorted(self.desired):
            with contextlib.suppress(SetupError):
                found.append(self._approved(key, self.describe))
        return found

    def take(self, key: ModelKey) -> Bundle:
        """A version to have, whose files stay until it is released. Raises SetupError and RefusedBundle, also for one
        that was not the one approved.
        """
        return self._approved(key, self.hold)

    def _approved(self, key: ModelKey, read: Callable[[ModelKey, str], Bundle]) -> Bundle:
        if key in self.fixed and not self.registry.revision:
            return self.fixed[key]
        approved = self.registry.models[key.name].versions[key.version]
        bundle = read(key, approved.digest)
        if bundle.digest != approved.digest:
            raise RefusedBundle(
                f"{bundle.folder}: its digest is {bundle.digest[:16]}, the registry has {approved.digest[:16]}: it is "
                "not the bundle that was approved"
            )
        return bundle

    @abstractmethod
    def look(self) -> None:
        """Reads the registry where it has changed."""

    @abstractmethod
    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """A version by its manifest. Raises SetupError and RefusedBundle."""

    @abstractmethod
    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """A version whose files stay until it is released. Raises SetupError and RefusedBundle."""

    @abstractmethod
    def release(self, key: ModelKey) -> None:
        """The version's files are not used any more."""

    @abstractmethod
    def end(self) -> None:
        """Makes calls of other threads that fetch, or wait, end soon."""


class FolderSource(LiveRepository):
    """A folder, in which everything lies."""

    def __init__(self, folder: Path, trusted: "TrustedKeys | None" = None) -> None:
        """Raises SetupError for a registry or bundles that cannot be read."""
        self._folder = folder
        self._trusted = trusted
        self._has_registry = False
        self._watched = Watched([folder / REGISTRY_FILE], self._read)
        self.registry, self.problem = self._watched.value, ""
        # The bundles of the start, which have been read.
        bundles = () if self.registry.revision else read_repository(folder, trusted)
        self.fixed = {ModelKey(*one.key): one for one in bundles}
        self.fetched = {}

    def look(self) -> None:
        self._watched.look()
        self.registry, self.problem = self._watched.value, self._watched.problem

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        return read_bundle(self._folder / key.name / str(key.version), self._trusted)

    hold = describe

    def release(self, key: ModelKey) -> None:
        """Nothing is held."""

    def end(self) -> None:
        """Nothing waits."""

    def _read(self) -> Registry:
        found = FolderRepository(self._folder).read_registry()
        if self._has_registry and not found.revision:
            raise SetupError(f"{self._folder / REGISTRY_FILE}: was there, and has vanished")
        self._has_registry = bool(found.revision)
        return found


class BucketSource(BundleCache, LiveRepository):
    """A bucket, with a cache. The last good registry is in the cache as well: a process that starts while the bucket
    does not answer serves by it.
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
        """`cache`: the folder for the caches of all buckets. Raises SetupError where there is no registry."""
        # Of another bucket of the same name, another folder.
        place = sha256(f"{repository.endpoint} {repository.uri}".encode()).hexdigest()[:16]
        parts = all_parts if with_artifacts else parts_without_artifacts
        super().__init__(cache.expanduser() / place, repository, max_bytes, parts, trusted)
        # Without retries: the next look is the next attempt.
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
            self._tell(str(error))

    def look(self) -> None:
        try:
            changed = self._read_changed()
        except SetupError as error:
            self._tell(str(error))
            return
        if self.problem:
            log("the registry can be read again", repository=self._watched_repository.uri)
        self.problem = ""
        if changed:
            self.registry = changed

    def _read_changed(self) -> Registry | None:
        """The registry; None where it has not changed. Raises SetupError."""
        found = self._watched_repository.read_registry_if_changed(self._etag)
        if found is None:
            return None
        registry, self._etag = found
        try:
            with self._writing():
                replace_file(self._kept, registry.model_dump_json().encode())
        except SetupError as error:
            log_warning("the registry cannot be kept for the next start", problem=str(error))
        return registry

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            log_warning("the registry cannot be read; what it said before stays", problem=problem)
        self.problem = problem


def check_folder(settings: ServerSettings) -> None:
    """Raises SetupError for a repository that is a folder without bundles. It reads none."""
    folder = Path(settings.repository)
    if not is_bucket(settings.repository) and not any(
        (folder / file).is_file() for file in (MANIFEST_FILE, REGISTRY_FILE)
    ):
        bundle_folders(folder)


def live_repository(settings: ServerSettings, *, with_artifacts: bool) -> LiveRepository:
    """The repository of a service. `with_artifacts`: whether it loads what back ends compute. Raises SetupError."""
    trusted = read_trusted_keys(settings.trusted_keys)
    found: LiveRepository
    if is_bucket(settings.repository):
        found = BucketSource(
            BucketRepository(settings.repository, settings.repository_endpoint),
            settings.repository_cache,
            settings.repository_cache_bytes,
            trusted,
            with_artifacts=with_artifacts,
        )
    else:
        found = FolderSource(Path(settings.repository), trusted)
    found.look_every_s = settings.registry_poll_s
    return found
