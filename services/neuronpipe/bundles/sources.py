"""Repositories, in a folder or in a bucket of S3: as processes load them, and as commands and gateways change them.

A process that loads from a bucket has a local cache.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from neuronpipe.bundles.bucket import BucketRepository
from neuronpipe.bundles.bundle_cache import BundleCache, all_parts, parts_without_artifacts
from neuronpipe.bundles.registry import Operation, Registry, Signed
from neuronpipe.bundles.registry_file import REGISTRY_FILE, change_registry, read_registry
from neuronpipe.bundles.repository import Bundle, read_bundle, read_repository, read_trusted_keys
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import replace_file
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.watched import Watched
from neuronpipe.platform.process.settings import ServerSettings, is_bucket

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys
if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


class Repository(Protocol):
    """Bundles and their registry. Every method raises SetupError."""

    def read_registry(self) -> Registry:
        """The registry; of revision 0 where there is none."""

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """See registry_file.change_registry."""

    def bundles(self) -> list[Bundle]:
        """Every version."""

    def bundle(self, key: ModelKey) -> Bundle:
        """A version, as its manifest has it."""

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """Raises also RefusedBundle for a bundle with files that are missing or damaged, or without the signature of
        one of the `trusted` keys.
        """


class FolderRepository:
    """A repository in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_registry(self) -> Registry:
        """See Repository."""
        return read_registry(self._folder)

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """See Repository."""
        return change_registry(self._folder, operation, signed, new)

    def bundles(self) -> list[Bundle]:
        """See Repository."""
        return read_repository(self._folder)

    def bundle(self, key: ModelKey) -> Bundle:
        """See Repository."""
        folder = self._folder / key.name / str(key.version)
        # A name is one folder: whoever asks over the network must not get out of the repository.
        if Path(key.name).name != key.name or key.name == ".." or "\0" in key.name or not folder.is_dir():
            raise SetupError(f"{folder}: no such bundle; `neuronpipe registry list` lists those that are there")
        return read_bundle(folder)

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """See Repository."""
        read_bundle(bundle.folder, trusted).files.check()


def open_repository(place: str, endpoint: str = "") -> Repository:
    """The repository of a folder, or of s3://BUCKET/PREFIX. `endpoint`: URL of the object store. Raises SetupError."""
    if not is_bucket(place):
        return FolderRepository(Path(place))
    from neuronpipe.bundles.bucket import BucketRepository

    return BucketRepository(place, endpoint)


def approve_version(repository: Repository, key: ModelKey, trusted_keys: Path | None, signed: Signed) -> Operation:
    """The operation that approves a version, whose files are checked now. Raises SetupError and RefusedBundle."""
    bundle = repository.bundle(key)
    repository.check(bundle, read_trusted_keys(trusted_keys))
    return lambda registry: registry.approve(bundle, signed)


def reject_version(repository: Repository, key: ModelKey, signed: Signed) -> Operation:
    """The operation that rejects a version. Raises SetupError for one that is not there."""
    bundle = repository.bundle(key)
    return lambda registry: registry.reject(bundle, signed)


class RepositorySource(Protocol):
    """A repository as a process needs it.

    `registry`: the last that could be read. `problem`: why it is not used as it is now; empty while it is. `fixed`:
    what is served without a registry. `fetched`: the share that is here of each version that is being fetched.
    """

    @property
    def registry(self) -> Registry: ...
    @property
    def problem(self) -> str: ...
    @property
    def fixed(self) -> Mapping[ModelKey, Bundle]: ...
    @property
    def fetched(self) -> Mapping[ModelKey, float]: ...

    def look(self) -> None:
        """Reads the registry where it has changed."""

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """A version by its manifest. Raises SetupError and RefusedBundle."""

    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """A version whose files stay until it is released. Raises SetupError and RefusedBundle."""

    def release(self, key: ModelKey) -> None:
        """The version's files are not used any more."""

    def end(self) -> None:
        """Makes calls of other threads end soon."""


class FolderSource:
    """A folder, in which everything lies."""

    def __init__(self, folder: Path, trusted: "TrustedKeys | None" = None) -> None:
        """Raises SetupError for a registry or bundles that cannot be read."""
        self._folder = folder
        self._trusted = trusted
        self._has_registry = False
        self._watched = Watched([folder / REGISTRY_FILE], self._read)
        # The bundles of the start, which have been read.
        self.fixed: Mapping[ModelKey, Bundle] = {}
        self.fetched: Mapping[ModelKey, float] = {}
        if not self.registry.revision:
            self.fixed = {ModelKey(*one.key): one for one in read_repository(folder, trusted)}

    @property
    def registry(self) -> Registry:
        """The last that could be read."""
        return self._watched.value

    @property
    def problem(self) -> str:
        """Why the registry as it is now is not used."""
        return self._watched.problem

    def look(self) -> None:
        """Reads the registry where it has changed."""
        self._watched.look()

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """A version. Raises SetupError and RefusedBundle."""
        return read_bundle(self._folder / key.name / str(key.version), self._trusted)

    hold = describe

    def release(self, key: ModelKey) -> None:
        """Nothing is held."""

    def end(self) -> None:
        """Nothing waits."""

    def _read(self) -> Registry:
        found = read_registry(self._folder)
        if self._has_registry and not found.revision:
            raise SetupError(f"{self._folder / REGISTRY_FILE}: was there, and has vanished")
        self._has_registry = bool(found.revision)
        return found


class BucketSource(BundleCache):
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
        self.fixed: Mapping[ModelKey, Bundle] = {}
        self.problem = ""
        self._etag = ""
        try:
            self.registry = self._read_changed() or Registry()
        except SetupError as error:
            self.registry = read_registry(self.folder)
            if not self.registry.revision:
                raise SetupError(
                    f"{error}; a repository in a bucket needs a registry: `neuronpipe bundle push --approve` makes it"
                ) from error
            self._tell(str(error))

    def look(self) -> None:
        """Reads the registry where it has changed."""
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
            replace_file(self._kept, registry.model_dump_json().encode())
        except OSError as error:
            log_warning("the registry cannot be kept for the next start", problem=str(self._not_writable(error)))
        return registry

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            log_warning("the registry cannot be read; what it said before stays", problem=problem)
        self.problem = problem


def repository_source(settings: ServerSettings, *, with_artifacts: bool) -> RepositorySource:
    """The source of a service. `with_artifacts`: whether it loads what back ends compute. Raises SetupError."""
    trusted = read_trusted_keys(settings.trusted_keys)
    if not is_bucket(settings.repository):
        return FolderSource(Path(settings.repository), trusted)
    return BucketSource(
        BucketRepository(settings.repository, settings.repository_endpoint),
        settings.repository_cache,
        settings.repository_cache_bytes,
        trusted,
        with_artifacts=with_artifacts,
    )
