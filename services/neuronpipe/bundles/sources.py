"""The repository of a command or a service, in a folder or in a bucket of S3, and the approval of its versions."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from neuronpipe.bundles.folder_repository import FolderRepository, FolderSource, LiveRepository
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import REGISTRY_FILE, Operation, Signed
from neuronpipe.bundles.repository import bundle_folders, read_trusted_keys
from neuronpipe.core.items import ModelKey
from neuronpipe.platform.process.settings import RepositorySettings
from neuronpipe.platform.storage import is_in_bucket

if TYPE_CHECKING:
    from neuronpipe.bundles.bucket_repository import BucketRepository

# A place of bundles and their registry.
Repository: TypeAlias = "FolderRepository | BucketRepository"


def open_repository(place: str, endpoint: str = "") -> Repository:
    """Opens a repository in a folder, or at s3://BUCKET/PREFIX, at the object store `endpoint`. Raises SetupError."""
    if not is_in_bucket(place):
        return FolderRepository(Path(place))
    from neuronpipe.bundles.bucket_repository import BucketRepository

    return BucketRepository(place, endpoint)


def approve_version(repository: Repository, key: ModelKey, trusted_keys: Path | None, signed: Signed) -> Operation:
    """Checks a version's files, and returns the operation that approves it. Raises SetupError and RefusedBundle."""
    bundle = repository.bundle(key)
    repository.check(bundle, read_trusted_keys(trusted_keys))
    return lambda registry: registry.approve(bundle, signed)


def reject_version(repository: Repository, key: ModelKey, signed: Signed) -> Operation:
    """Returns the operation that rejects a version. Raises SetupError if the version does not exist."""
    bundle = repository.bundle(key)
    return lambda registry: registry.reject(bundle, signed)


def check_folder(settings: RepositorySettings) -> None:
    """Raises SetupError if a repository's folder contains no bundles. Reads no bundle."""
    files = (Path(settings.repository) / name for name in (MANIFEST_FILE, REGISTRY_FILE))
    if not is_in_bucket(settings.repository) and not any(file.is_file() for file in files):
        bundle_folders(Path(settings.repository))


def live_repository(settings: RepositorySettings, *, with_artifacts: bool) -> LiveRepository:
    """Opens a service's repository. `with_artifacts`: the service loads the artefacts. Raises SetupError."""
    trusted = read_trusted_keys(settings.trusted_keys)
    if not is_in_bucket(settings.repository):
        return FolderSource(Path(settings.repository), trusted)
    from neuronpipe.bundles.bucket_repository import BucketRepository
    from neuronpipe.bundles.bundle_cache import BucketSource

    cache, max_bytes = settings.repository_cache, settings.repository_cache_bytes
    repository = BucketRepository(settings.repository)
    return BucketSource(repository, cache, max_bytes, trusted, with_artifacts=with_artifacts)
