"""Files of rows and the output folder of a run, on a file system or in S3.

Files of the output folder appear complete or not at all.
"""

import contextlib
import errno
import fcntl
import fnmatch
import glob
import gzip
import hashlib
import io
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from neuronpipe.bulk.transform.formats import COMPRESSIONS, ENDINGS
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.storage import (
    BucketFolder,
    ObjectUri,
    StorageError,
    etag_of,
    fetch,
    is_in_bucket,
    list_objects,
)

_READ_BYTES = 1 << 20
_ENDINGS = tuple(
    ending + compression
    for format_endings in ENDINGS.values()
    for ending in format_endings
    for compression in ("", *COMPRESSIONS)
)
# Errors of a damaged compressed file. pyarrow raises OSError without a number.
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Returns the files that names, folders and patterns match, each once, sorted per pattern. Raises SetupError."""
    files: dict[str, None] = {}
    for pattern in patterns:
        if is_in_bucket(pattern):
            matching = _find_objects(pattern)
        elif Path(pattern).is_dir():
            matching = sorted(str(path) for path in Path(pattern).iterdir() if path.name.endswith(_ENDINGS))
        else:
            matching = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (also absolute)
        if not matching:
            raise SetupError(f"--input {pattern}: no such file")
        if irregular := next((file for file in matching if not (is_in_bucket(file) or Path(file).is_file())), ""):
            raise SetupError(f"--input {irregular}: is no regular file, and rows are read twice; save them in a file")
        files |= dict.fromkeys(matching)
    return list(files)


def _find_objects(pattern: str) -> list[str]:
    """Returns the objects of a URI: one object, or the objects of a folder or pattern. Raises SetupError."""
    uri = object_uri(pattern)
    with naming(pattern):
        begin = ObjectUri(uri.bucket, re.split(r"[*?\[]", uri.path, maxsplit=1)[0])
        objects = [str(listed) for listed in list_objects(begin)]
    if begin == uri:
        return [name for name in objects if name == pattern or (pattern.endswith("/") and name.endswith(_ENDINGS))]
    return [name for name in objects if fnmatch.fnmatchcase(name, pattern)]


def object_uri(file: str) -> ObjectUri:
    """Parses the URI of an object. Raises SetupError."""
    try:
        return ObjectUri.parse(file)
    except ValueError as error:
        raise SetupError(f"{file}: {error}") from error


@contextmanager
def local_copy(file: str) -> Iterator[str]:
    """Yields the path of a file for the block: its own, or a temporary copy of the object. Raises SetupError."""
    if not is_in_bucket(file):
        yield file
        return
    # The suffix keeps the ending, which says how the file is compressed.
    with tempfile.NamedTemporaryFile(suffix=Path(file).name) as copy:
        with naming(file):
            fetch(object_uri(file), cast(BinaryIO, copy))
            copy.flush()
        yield copy.name


def open_input(file: str) -> BinaryIO:
    """Opens a file of rows, decompressed. Raises SetupError."""
    if is_in_bucket(file):
        with local_copy(file) as copy:
            return open_input(copy)  # the open file stays until it is closed
    compression = COMPRESSIONS.get(Path(file).suffix)
    try:
        if compression == "gzip":
            return cast(BinaryIO, gzip.open(file))
        opened = Path(file).open("rb")  # noqa: SIM115 (its reader closes it)
    except OSError as error:
        raise _unreadable(file, error) from error
    if compression is None:
        return opened
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(opened, compression), _READ_BYTES)


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Turns the errors of reading a file in the block into a SetupError that names the file."""
    try:
        yield
    except (SetupError, StorageError) as error:
        raise SetupError(f"{file}: {error}") from error
    except _DAMAGED as error:
        raise SetupError(f"{file}: is damaged, or was cut off: it cannot be decompressed") from error
    except OSError as error:
        if error.errno is None:
            raise SetupError(f"{file}: is damaged: {error}") from error
        raise _unreadable(file, error) from error


def mark_of(file: str) -> str:
    """Returns a text that changes with a file: its size and time, or the ETag of an object. Raises OSError,
    StorageError and SetupError.
    """
    if is_in_bucket(file):
        return etag_of(object_uri(file))
    status = Path(file).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def digest(file: str) -> str:
    """Returns the SHA-256 of a file as it is stored. Raises OSError."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def unwritable(path: object) -> Iterator[None]:
    """Turns the errors of writing a file in the block into a SetupError that names the file."""
    try:
        yield
    except StorageError as error:
        raise SetupError(f"{path}: cannot be written: {error}") from error
    except OSError as error:
        problem = os.strerror(error.errno or errno.EIO)
        raise SetupError(
            f"{path}: cannot be written: {problem}; complete shards stay, and the same command continues from them"
        ) from error


def _unreadable(file: str, error: OSError) -> SetupError:
    return SetupError(f"{file}: cannot be read: {os.strerror(error.errno or errno.EIO)}")


class NewFile:
    """A file that has no name until it is complete."""

    def __init__(self, path: object, file: BinaryIO, keep: Callable[[], None], drop: Callable[[], None]) -> None:
        """`path`: for messages. `keep`: stores the whole open file under its name. `drop`: deletes what is left."""
        self.file = file
        self._path = path
        self._keep = keep
        self._drop = drop

    def complete(self) -> None:
        """Gives the file its name, when all of it is stored. Raises SetupError."""
        with unwritable(self._path):
            self._keep()
            self.file.close()

    def discard(self) -> None:
        """Deletes the written bytes, unless the file is complete."""
        with contextlib.suppress(OSError):  # the buffered rest may also find no room
            self.file.close()
        self._drop()


class _LocalFolder:
    """Files by their names, which may begin with a folder. Every method raises SetupError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, name: str) -> NewFile:
        path = self._path / name
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        with unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = unfinished.open("wb")

        def keep() -> None:
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)

        return NewFile(path, file, keep, lambda: unfinished.unlink(missing_ok=True))

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it does not exist."""
        with naming(str(self._path / name)):
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                return None

    def sizes(self, names: list[str]) -> dict[str, int]:
        paths = {name: self._path / name for name in names}
        return {name: path.stat().st_size for name, path in paths.items() if path.exists()}

    def names(self, folder: str) -> list[str]:
        """Returns the complete files in a subfolder, in order."""
        return sorted(f"{folder}/{path.name}" for path in (self._path / folder).glob("[!.]*"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder, and locks it against other runs for the block. Deletes unfinished files of killed runs."""
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


class _S3Folder:
    def __init__(self, uri: ObjectUri) -> None:
        self._uri = uri
        with naming(str(uri)):
            self._objects = BucketFolder(uri)

    def create(self, name: str) -> NewFile:
        """See _LocalFolder. The file is written to a temporary file, which is uploaded when it is complete."""
        uri = self._objects.uri(name)
        with unwritable(uri):
            file = cast(BinaryIO, tempfile.TemporaryFile("w+b"))  # noqa: SIM115 (closed by discard)

        def keep() -> None:
            file.seek(0)
            self._objects.store(name, file)

        return NewFile(uri, file, keep, lambda: None)

    def read(self, name: str) -> bytes | None:
        with naming(self._objects.uri(name)):
            content = self._objects.read(name)
        return content.data if content else None

    def sizes(self, names: list[str]) -> dict[str, int]:
        with naming(str(self._uri)):
            sizes = {name: self._objects.size(name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def names(self, folder: str) -> list[str]:
        with naming(str(self._uri)):
            return sorted(listed.name for listed in self._objects.list_all() if listed.name.startswith(f"{folder}/"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See _LocalFolder. S3 has no locks: two runs would do the same work, and write the same files."""
        yield


Folder: TypeAlias = _LocalFolder | _S3Folder


def open_folder(name: str) -> Folder:
    """Opens the folder of a path or a URI. Raises SetupError."""
    return _S3Folder(object_uri(name)) if is_in_bucket(name) else _LocalFolder(Path(name))


def write_file(folder: Folder, name: str, content: bytes) -> None:
    """Writes a small file. Raises SetupError."""
    new = folder.create(name)
    try:
        with unwritable(name):
            new.file.write(content)
        new.complete()
    finally:
        new.discard()
