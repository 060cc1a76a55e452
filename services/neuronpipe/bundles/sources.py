"""Where a process has its repository from: a folder, or a bucket of S3 with a local cache."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from neuronpipe.bundles.bucket import BucketRepository
from neuronpipe.bundles.bundle_cache import BundleCache, all_parts, parts_without_artifacts
from neuronpipe.bundles.registry import Registry
from neuronpipe.bundles.registry_file import REGISTRY_FILE, read_registry
from neuronpipe.bundles.repository import Bundle, read_bundle, read_repository, read_trusted_keys
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import replace_file
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.watched import Watched
from neuronpipe.platform.process.settings import ServerSettings, is_bucket

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


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
