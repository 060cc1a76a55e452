"""registry.json of a repository: read, and replaced by one writer at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import Operation, Registry, Signed
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import replace_file

REGISTRY_FILE = "registry.json"
_MAX_BYTES = 64 << 20


def read_registry(repository: Path) -> Registry:
    """The registry of a repository, of revision 0 where it has none. Raises SetupError for one that cannot be read."""
    path = repository / REGISTRY_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SetupError(f"{path}: more than {_MAX_BYTES:,} bytes, the limit")
        return Registry.parse(path.read_bytes(), path)
    except FileNotFoundError:
        return Registry()
    except OSError as error:
        raise SetupError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error


def change_registry(
    repository: Path, operation: Operation, signed: Signed, new: tuple[str, int] | None = None
) -> Registry:
    """Applies an operation to the registry as it is now, and writes the result. Returns it.

    The first operation on a repository without a registry writes down first what was served up to then, without the
    version `new`, which has just been made. Writers wait for each other, and readers see the old file or the new one.
    Raises SetupError, and what the operation raises.
    """
    if (repository / MANIFEST_FILE).is_file():
        raise SetupError(f"{repository}: is a bundle; a registry is in a repository, the folder of its model's folder")
    path = repository / REGISTRY_FILE
    try:
        with _locked(repository):
            present = read_registry(repository)
            if not present.revision:
                bundles = [bundle for bundle in read_repository(repository) if bundle.key != new]
                present = Registry.of_bundles(bundles, signed)
            changed = operation(present)
            replace_file(path, changed.model_dump_json(indent=2).encode() + b"\n", mode=0o644)
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {os.strerror(error.errno or 0)}") from error
    return changed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other writers out. The lock is the folder's, so it leaves no file, and ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
