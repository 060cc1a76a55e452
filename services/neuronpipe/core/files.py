"""Files that are replaced as a whole, and what is said of those that cannot be read or written."""

import errno
import os
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
