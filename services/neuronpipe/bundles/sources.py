"""Repositories in a folder or in a bucket of S3: processes load from them, commands and gateways change them.

A process that loads from a bucket uses a local cache.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
from neuronpipe.core.files import files_told, locked_folder, read_file, replace_file
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_warning
from neuronpipe.platform.process.settings import RepositorySettings, is_bucket
from neuronpipe.platform.watched import Watched

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


class FolderRepository:
    """A repository in a folder. Every method raises SetupError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_registry(self) -> Registry:
        """The registry, or a registry of revision 0 if the folder contains none."""
        path = self._folder / REGISTRY_FILE
        with files_told(f"{path}: cannot be read"):
            try:
                path.stat()
            except FileNotFoundError:
                return Registry()
        return Registry.parse(read_file(path, str(path)), path)

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """Applies an operation to the present registry, writes the result and returns it.

        In a repository without a registry, the first operation starts from a registry of all versions that were served
        until then. `new`: a version that has just been made and is left out of that registry. Writers wait for each
        other, and readers see either the old or the new file. Raises also the errors of the operation.
        """
        if (self._folder / MANIFEST_FILE).is_file():
            raise SetupError(
                f"{self._folder}: is a bundle; a registry is in a repository, the folder of its model's folder"
            )
        path = self._folder / REGISTRY_FILE
        with files_told(f"{path}: cannot be written"), locked_folder(self._folder):
            present = self.read_registry()
            if not present.revision:
                present = Registry.of_bundles([bundle for bundle in self.bundles() if bundle.key != new], signed)
            changed = operation(present)
            replace_file(path, changed.model_dump_json(indent=2).encode() + b"\n", mode=0o644)
        return changed

    def bundles(self) -> list[Bundle]:
        """Every version."""
        return read_repository(self._folder)

    def bundle(self, key: ModelKey) -> Bundle:
        """A version, as its manifest describes it."""
        folder = self._folder / key.name / str(key.version)
        # A name is one folder: a client that asks over the network must not leave the repository.
        is_name = Path(key.name).name == key.name and key.name != ".." and "\0" not in key.name
        with files_told(f"{folder}: cannot be read"):
            if not is_name or not folder.is_dir():
                raise SetupError(f"{folder}: no such bundle; `neuronpipe registry list` lists those that are there")
        return read_bundle(folder)

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """Raises RefusedBundle also for a bundle with missing or damaged files, or without the signature of one of
        the `trusted` keys.
        """
        read_bundle(bundle.folder, trusted).files.check()


# A place of bundles and their registry.
Repository: TypeAlias = FolderRepository | BucketRepository


def open_repository(place: str, endpoint: str = "") -> Repository:
    """Opens a repository in a folder, or at s3://BUCKET/PREFIX. `endpoint`: the object store's URL. Raises
    SetupError.
    """
    return BucketRepository(place, endpoint) if is_bucket(place) else FolderRepository(Path(place))


def approve_version(repository: Repository, key: ModelKey, trusted_keys: Path | None, signed: Signed) -> Operation:
    """Checks a version's files, and returns the operation that approves it. Raises SetupError and RefusedBundle."""
    bundle = repository.bundle(key)
    repository.check(bundle, read_trusted_keys(trusted_keys))
    return lambda registry: registry.approve(bundle, signed)


def reject_version(repository: Repository, key: ModelKey, signed: Signed) -> Operation:
    """Returns the operation that rejects a version. Raises SetupError for a version that does not exist."""
    bundle = repository.bundle(key)
    return lambda registry: registry.reject(bundle, signed)


class LiveRepository(ABC):
    """A repository from which a process loads, with the last registry that could be read.

    `registry`: revision 0 if there is none. `problem`: the reason why the present registry is not used, or empty.
    `fixed`: the versions to serve without a registry. `fetched`: the share of the bytes that have arrived, from 0 to 1,
    for each version that is being fetched.
    """

    registry: Registry
    problem: str
    fixed: Mapping[ModelKey, Bundle]
    fetched: dict[ModelKey, float]
    look_every_s = 1.0

    @property
    def desired(self) -> frozenset[ModelKey]:
        """The versions to load."""
        return frozenset(self.registry.desired if self.registry.revision else self.fixed)

    def bundles(self) -> list[Bundle]:
        """The versions to load, by their manifests, without versions whose manifests cannot be read."""
        bundles = []
        for key in sorted(self.desired):
            with contextlib.suppress(SetupError):
                bundles.append(self._approved(key, self.describe))
        return bundles

    def take(self, key: ModelKey) -> Bundle:
        """Returns a version to load, whose files stay until it is released. Raises SetupError, and RefusedBundle
        also for a bundle that was not approved.
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
        """Reads the registry if it has changed."""

    @abstractmethod
    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """Reads the manifest of a version. Raises SetupError and RefusedBundle."""

    @abstractmethod
    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """Returns a version, whose files stay until it is released. Raises SetupError and RefusedBundle."""

    @abstractmethod
    def release(self, key: ModelKey) -> None:
        """Ends the use of a version's files."""

    @abstractmethod
    def end(self) -> None:
        """Makes calls of other threads that fetch or wait end soon."""


class FolderSource(LiveRepository):
    """A repository in a folder, which contains all files."""

    def __init__(self, folder: Path, trusted: "TrustedKeys | None" = None) -> None:
        """Raises SetupError for a registry or bundles that cannot be read."""
        self._folder = folder
        self._trusted = trusted
        self._has_registry = False
        self._watched = Watched([folder / REGISTRY_FILE], self._read)
        self.registry, self.problem = self._watched.value, ""
        # The bundles that were read at the start.
        bundles = () if self.registry.revision else read_repository(folder, trusted)
        self.fixed = {ModelKey(*bundle.key): bundle for bundle in bundles}
        self.fetched = {}

    def look(self) -> None:
        self._watched.look()
        self.registry, self.problem = self._watched.value, self._watched.problem

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        return read_bundle(self._folder / key.name / str(key.version), self._trusted)

    hold = describe

    def release(self, key: ModelKey) -> None:
        """Does nothing: a folder holds no versions."""

    def end(self) -> None:
        """Does nothing: no thread waits for a folder."""

    def _read(self) -> Registry:
        registry = FolderRepository(self._folder).read_registry()
        if self._has_registry and not registry.revision:
            raise SetupError(f"{self._folder / REGISTRY_FILE}: was there, and has vanished")
        self._has_registry = bool(registry.revision)
        return registry


class BucketSource(BundleCache, LiveRepository):
    """A repository in a bucket, with a cache. The cache also contains the last good registry, by which a process
    that starts while the bucket is unavailable serves.
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
        parts = all_parts if with_artifacts else parts_without_artifacts
        super().__init__(cache.expanduser() / place, repository, max_bytes, parts, trusted)
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


def check_folder(settings: RepositorySettings) -> None:
    """Raises SetupError for a repository folder without bundles. Reads no bundle."""
    folder = Path(settings.repository)
    if not is_bucket(settings.repository) and not any(
        (folder / file).is_file() for file in (MANIFEST_FILE, REGISTRY_FILE)
    ):
        bundle_folders(folder)


def live_repository(settings: RepositorySettings, *, with_artifacts: bool) -> LiveRepository:
    """Opens a service's repository. `with_artifacts`: the service loads the artefacts. Raises SetupError."""
    trusted = read_trusted_keys(settings.trusted_keys)
    if is_bucket(settings.repository):
        return BucketSource(
            BucketRepository(settings.repository),
            settings.repository_cache,
            settings.repository_cache_bytes,
            trusted,
            with_artifacts=with_artifacts,
        )
    return FolderSource(Path(settings.repository), trusted)
