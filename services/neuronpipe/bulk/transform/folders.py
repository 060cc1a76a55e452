"""The output folder of a run, on a file system or in S3. Its files appear complete or not at all."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from neuronpipe.bulk.transform.files import is_object, naming, object_uri, unwritable
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.storage.files import fetch, list_objects, size_of, store
from neuronpipe.platform.storage.objects import StorageError
from neuronpipe.platform.storage.uris import ObjectUri


class NewFile(Protocol):
    """A file that has no name until it is complete."""

    file: BinaryIO

    def complete(self) -> None:
        """Gives the file its name, when all of it is stored. Raises SetupError."""

    def discard(self) -> None:
        """Deletes what was written, unless it is complete."""


class Folder(Protocol):
    """Files by their names, which may have a folder before."""

    def create(self, name: str) -> NewFile:
        """A new file, to write to. Raises SetupError."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none. Raises SetupError."""

    def sizes(self, names: list[str]) -> dict[str, int]:
        """The sizes of those files that are there. Raises SetupError."""

    def names(self, folder: str) -> list[str]:
        """The complete files in a folder below, in order. Raises SetupError."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Makes the folder; during the block no other run may have it. Raises SetupError."""


def open_folder(name: str) -> Folder:
    """The folder of a path or a URI. Raises SetupError."""
    return _BucketFolder(object_uri(name)) if is_object(name) else _LocalFolder(Path(name))


def write_file(folder: Folder, name: str, content: bytes) -> None:
    """Writes a small file. Raises SetupError."""
    new = folder.create(name)
    try:
        with unwritable(name):
            new.file.write(content)
        new.complete()
    finally:
        new.discard()


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        with unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = self._unfinished.open("wb")

    def complete(self) -> None:
        """See NewFile."""
        with unwritable(self._path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self._unfinished.replace(self._path)

    def discard(self) -> None:
        """See NewFile."""
        with contextlib.suppress(OSError):  # what is left to be written finds no room, either
            self.file.close()
        self._unfinished.unlink(missing_ok=True)


class _LocalFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, name: str) -> NewFile:
        """See Folder."""
        return _LocalFile(self._path / name)

    def read(self, name: str) -> bytes | None:
        """See Folder."""
        with naming(str(self._path / name)):
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                return None

    def sizes(self, names: list[str]) -> dict[str, int]:
        """See Folder."""
        paths = {name: self._path / name for name in names}
        return {name: path.stat().st_size for name, path in paths.items() if path.exists()}

    def names(self, folder: str) -> list[str]:
        """See Folder."""
        return sorted(f"{folder}/{path.name}" for path in (self._path / folder).glob("[!.]*"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See Folder. Deletes what runs that were killed have left."""
        with unwritable(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            lock = (self._path / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SetupError(f"--output {self._path}: another run writes there") from error
            self._delete_unfinished()
            yield
            self._delete_unfinished()

    def _delete_unfinished(self) -> None:
        for path in self._path.rglob(".*.unfinished"):
            path.unlink(missing_ok=True)


class _BucketFile:
    """Written to a temporary file, which is uploaded when it is complete."""

    def __init__(self, uri: ObjectUri) -> None:
        self._uri = uri
        with unwritable(uri):
            self.file: BinaryIO = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by discard)

    def complete(self) -> None:
        """See NewFile."""
        with unwritable(self._uri):
            self.file.seek(0)
            store(self.file, self._uri)
            self.file.close()

    def discard(self) -> None:
        """See NewFile."""
        self.file.close()


class _BucketFolder:
    def __init__(self, uri: ObjectUri) -> None:
        self._uri = uri

    def create(self, name: str) -> NewFile:
        """See Folder."""
        return _BucketFile(self._object(name))

    def read(self, name: str) -> bytes | None:
        """See Folder."""
        with naming(str(self._object(name))), tempfile.TemporaryFile("w+b") as file:
            try:
                fetch(self._object(name), file)
            except StorageError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return None
                raise
            file.seek(0)
            return file.read()

    def sizes(self, names: list[str]) -> dict[str, int]:
        """See Folder."""
        with naming(str(self._uri)):
            found = {name: size_of(self._object(name)) for name in names}
        return {name: size for name, size in found.items() if size is not None}

    def names(self, folder: str) -> list[str]:
        """See Folder."""
        prefix = self._object(f"{folder}/")
        with naming(str(prefix)):
            return [f"{folder}/{uri.path.removeprefix(prefix.path)}" for uri in list_objects(prefix)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See Folder. S3 has no locks: two runs would do the same work, and write the same."""
        yield

    def _object(self, name: str) -> ObjectUri:
        return ObjectUri(self._uri.scheme, self._uri.bucket, f"{self._uri.path.rstrip('/')}/{name}".lstrip("/"))
