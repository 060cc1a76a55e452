"""Values that stand for a file, as with curl and HTTPie: @FILE, and @- or - for standard input."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.core.errors import SetupError

_STDIN = ("-", "@-")


def read_text(value: str, flag: str) -> str:
    """The value, or the whole file that it stands for without the line break at its end. Raises SetupError."""
    if value not in _STDIN and not value.startswith("@"):
        return value
    content = read_bytes("-" if value in _STDIN else value[1:], flag)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SetupError(f"{flag} {value}: is not UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")


def read_lines(values: Sequence[str], flag: str) -> list[str]:
    """The values; of a file each line, but for empty ones. Raises SetupError."""
    found: list[str] = []
    for value in values:
        text = read_text(value, flag)
        is_file = text is not value
        found += [line.removesuffix("\r") for line in text.split("\n") if line.strip()] if is_file else [text]
    if not found:
        raise SetupError(f"{flag} {' '.join(values)}: has no text")
    return found


def read_bytes(file: str, flag: str) -> bytes:
    """The content of a file, or of standard input, which - stands for. Raises SetupError."""
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise SetupError(f"{flag} {file}: cannot be read: {os.strerror(error.errno or errno.EIO)}") from error
