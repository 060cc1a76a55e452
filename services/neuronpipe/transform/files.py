"""Files of rows, and files of a run that appear complete or not at all."""

import contextlib
import errno
import glob
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from neuronpipe.core.errors import SetupError
from neuronpipe.transform.formats import COMPRESSIONS, ENDINGS

_READ_BYTES = 1 << 20
# What a damaged compressed file raises. pyarrow raises OSError without a number.
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that names, folders and patterns stand for, each once, sorted within each. Raises SetupError."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if Path(pattern).is_dir():
            endings = tuple(
                ending + compression
                for of_format in ENDINGS.values()
                for ending in of_format
                for compression in ("", *COMPRESSIONS)
            )
            matching = sorted(str(path) for path in Path(pattern).iterdir() if path.name.endswith(endings))
        else:
            matching = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (also absolute)
        if not matching:
            raise SetupError(f"--input {pattern}: no such file")
        found |= dict.fromkeys(matching)
    return list(found)


def open_input(file: str) -> BinaryIO:
    """A file of rows, decompressed. Raises SetupError."""
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
    except SetupError as error:
        raise SetupError(f"{file}: {error}") from error
    except _DAMAGED as error:
        raise SetupError(f"{file}: is damaged, or was cut off: it cannot be decompressed") from error
    except OSError as error:
        if error.errno is None:
            raise SetupError(f"{file}: is damaged: {error}") from error
        raise _unreadable(file, error) from error


def digest(file: str) -> str:
    """The SHA-256 of a file as it is stored. Raises SetupError."""
    with naming(file), Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_file(path: Path) -> bytes | None:
    """A file of the run; None where there is none. Raises SetupError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(str(path), error) from error


class NewFile:
    """A file that is written under another name until `complete`."""

    def __init__(self, path: Path) -> None:
        """Raises SetupError."""
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        with unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = self._unfinished.open("wb")

    def complete(self) -> None:
        """Gives the file its name, when all of it is on the disk. Raises SetupError."""
        with unwritable(self._path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self._unfinished.replace(self._path)

    def discard(self) -> None:
        """Deletes what was written, unless it is complete."""
        with contextlib.suppress(OSError):  # what is left to be written finds no room, either
            self.file.close()
        self._unfinished.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file of a run. Raises SetupError."""
    new = NewFile(path)
    try:
        with unwritable(path):
            new.file.write(content)
        new.complete()
    finally:
        new.discard()


def delete_unfinished(folder: Path) -> None:
    """Deletes what runs that were killed have left."""
    for path in folder.glob(".*.unfinished"):
        path.unlink(missing_ok=True)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Turns the errors of writing a file in the block into a SetupError that names the file."""
    try:
        yield
    except OSError as error:
        problem = os.strerror(error.errno or errno.EIO)
        raise SetupError(
            f"{path}: cannot be written: {problem}; complete shards stay, and the same command goes on from them"
        ) from error


def _unreadable(file: str, error: OSError) -> SetupError:
    return SetupError(f"{file}: cannot be read: {os.strerror(error.errno or errno.EIO)}")
