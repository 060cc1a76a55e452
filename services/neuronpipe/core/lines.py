"""Files that users write, with one thing on each line."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.core.errors import SetupError


def read_lines(path: Path, option: str, *, max_bytes: int) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, with their numbers from 1 on.

    `option` is the one that named the file. Raises SetupError, which names both, the line and the limit.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SetupError(f"{option} {path}: {error.strerror}") from error
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
