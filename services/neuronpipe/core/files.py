"""Files that are replaced as a whole, files with one thing on each line, and those that cannot be read or written."""

import codecs
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuronpipe.core.errors import SetupError


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, unfinished_in: Path | None = None) -> None:
    """Replaces a file: others see its old content or the whole new one, also after a crash of the machine.

    `unfinished_in`: the folder, on the same file system, in which the new file is made; that of the path by default.
    Raises OSError, and leaves nothing then.
    """
    handle, name = tempfile.mkstemp(dir=unfinished_in or path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def files_told(problem: str, advice: str = "", kind: type[SetupError] = SetupError) -> Iterator[None]:
    """Raises an error for an OSError of the block: the problem, such as "FILE: cannot be read", why, and the advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {os.strerror(error.errno or errno.EIO)}{advice}") from error


_MAX_BYTES = 64 << 20


def read_file(path: Path | str, name: str, kind: type[SetupError] = SetupError) -> bytes:
    """The content of a file, which messages call by a name. Raises an error, also for more bytes than the limit."""
    # Without waiting: a pipe may never have a writer, and a device may have no end.
    with (
        files_told(f"{name}: cannot be read", kind=kind),
        open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise kind(f"{name}: is a pipe or a device; must be a file")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise kind(f"{name}: more than {_MAX_BYTES:,} bytes, the limit of such a file")
    return content


def read_lines(path: Path, option: str, *, max_bytes: int) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, with their numbers from 1 on.

    `option` is the one that named the file. Raises SetupError, which names both, the line and the limit.
    """
    with files_told(f"{option} {path}"), path.open("rb") as file:
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
