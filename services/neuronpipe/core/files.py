"""Files that are replaced as a whole."""

import os
import tempfile
from pathlib import Path


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
