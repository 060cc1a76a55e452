"""Files of rows, on a file system or in S3."""

import errno
import fnmatch
import glob
import gzip
import hashlib
import io
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from neuronpipe.bulk.transform.formats import COMPRESSIONS, ENDINGS
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.storage.files import fetch, list_objects
from neuronpipe.platform.storage.objects import StorageError
from neuronpipe.platform.storage.uris import ObjectUri

_READ_BYTES = 1 << 20
_ENDINGS = tuple(
    ending + compression
    for of_format in ENDINGS.values()
    for ending in of_format
    for compression in ("", *COMPRESSIONS)
)
# What a damaged compressed file raises. pyarrow raises OSError without a number.
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that names, folders and patterns stand for, each once, sorted within each. Raises SetupError."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if is_object(pattern):
            matching = _find_objects(pattern)
        elif Path(pattern).is_dir():
            matching = sorted(str(path) for path in Path(pattern).iterdir() if path.name.endswith(_ENDINGS))
        else:
            matching = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (also absolute)
        if not matching:
            raise SetupError(f"--input {pattern}: no such file")
        found |= dict.fromkeys(matching)
    return list(found)


def _find_objects(pattern: str) -> list[str]:
    """The objects that a URI stands for: one, those below a folder, or those of a pattern. Raises SetupError."""
    uri = object_uri(pattern)
    with naming(pattern):
        begin = ObjectUri(uri.scheme, uri.bucket, re.split(r"[*?\[]", uri.path, maxsplit=1)[0])
        found = [str(one) for one in list_objects(begin)]
    if begin == uri:
        return [one for one in found if one == pattern or (pattern.endswith("/") and one.endswith(_ENDINGS))]
    return [one for one in found if fnmatch.fnmatchcase(one, pattern)]


def is_object(file: str) -> bool:
    """Whether a file is an object of S3."""
    return file.startswith("s3://")


def object_uri(file: str) -> ObjectUri:
    """The object of a URI. Raises SetupError."""
    try:
        return ObjectUri.parse(file)
    except ValueError as error:
        raise SetupError(f"{file}: {error}") from error


@contextmanager
def local_copy(file: str) -> Iterator[str]:
    """The path of a file during the block: its own, or that of a copy of the object. Raises SetupError."""
    if not is_object(file):
        yield file
        return
    # With its ending, which says how it is compressed.
    with tempfile.NamedTemporaryFile(suffix=Path(file).name) as copy:
        with naming(file):
            fetch(object_uri(file), cast(BinaryIO, copy))
            copy.flush()
        yield copy.name


def open_input(file: str) -> BinaryIO:
    """A file of rows, decompressed. Raises SetupError."""
    if is_object(file):
        with local_copy(file) as copy:
            return open_input(copy)  # which stays until it is closed
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


def digest(file: str) -> str:
    """The SHA-256 of a file as it is stored. Raises OSError."""
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
            f"{path}: cannot be written: {problem}; complete shards stay, and the same command goes on from them"
        ) from error


def _unreadable(file: str, error: OSError) -> SetupError:
    return SetupError(f"{file}: cannot be read: {os.strerror(error.errno or errno.EIO)}")
