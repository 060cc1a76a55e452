"""Files: replaced as a whole, read by lines, locked, and turned into errors that name them."""

import codecs
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from neuronpipe.core.errors import SetupError


def replace_file(
    path: Path, content: bytes | BinaryIO, *, mode: int = 0o600, unfinished_in: Path | None = None
) -> None:
    """Replaces a file: other processes see its old content or the whole new content, also after a crash of the machine.

    `unfinished_in`: the folder of the unfinished file, on the same file system; by default the folder of `path`. Raises
    OSError, and leaves no file then.
    """
    handle, name = tempfile.mkstemp(dir=unfinished_in or path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            if isinstance(content, bytes):
                file.write(content)
            else:
                shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(handle)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def reporting_os_errors(problem: str, advice: str = "", kind: type[SetupError] = SetupError) -> Iterator[None]:
    """Turns an OSError of the block into an error: problem, such as "FILE: cannot be read", cause and advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {os.strerror(error.errno or errno.EIO)}{advice}") from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keeps other writers out. The folder itself is locked, so the lock leaves no file, and ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_MAX_BYTES = 64 << 20


def read_file(path: Path | str, name: str, kind: type[SetupError] = SetupError) -> bytes:
    """Returns the content of a file, which errors call `name`. Raises an error also for more bytes than the limit."""
    # Opened without waiting: a pipe may never have a writer, and a device may have no end.
    with (
        reporting_os_errors(f"{name}: cannot be read", kind=kind),
        open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise kind(f"{name}: is a pipe or a device; must be a file")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise kind(f"{name}: more than {_MAX_BYTES:,} bytes, the limit of such a file")
    return content


def read_lines(path: Path, option: str, *, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Yields the lines of a UTF-8 file that are not blank, with their numbers from 1 on. Raises SetupError."""
    with reporting_os_errors(f"{option} {path}"), path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise SetupError(f"{option} {path}: more than {max_bytes:,} bytes, the limit of such a file")
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise SetupError(
                f"{option} {path}: line {number} is not UTF-8 (byte {error.start + 1} of the line)"
            ) from error
        if text and not text.isspace():
            yield number, text


_SKIPPED_BYTES = 1 << 20


def lines_of(file: BinaryIO, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields each line of an open file, its line break included, and the line's full size.

    A line longer than `max_bytes` is cut to `max_bytes` + 1 bytes.
    """
    while line := file.readline(max_bytes + 1):
        size = len(line)
        rest = line
        while len(rest) > 0 and size > max_bytes and not rest.endswith(b"\n"):
            rest = file.readline(_SKIPPED_BYTES)
            size += len(rest)
        yield line, size
