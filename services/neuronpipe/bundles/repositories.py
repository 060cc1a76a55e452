"""Repositories as commands and gateways read and change them: a folder, or a bucket of S3."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from neuronpipe.bundles.registry import Operation, Registry, Signed
from neuronpipe.bundles.registry_file import change_registry, read_registry
from neuronpipe.bundles.repository import Bundle, read_bundle, read_repository, read_trusted_keys
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.platform.process.settings import is_bucket

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
        if Path(key.name).name != key.name or "\0" in key.name or not folder.is_dir():
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
