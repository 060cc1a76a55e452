"""Formats of rows: their contract, the choice of a format, and a file for each."""

import base64
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np

from neuronpipe.core.errors import SetupError

# A row, or the problem of a row that cannot be read.
InputRow: TypeAlias = Mapping[str, Any] | str
# A row of results, in the order of the columns.
Record: TypeAlias = Mapping[str, Any]

# The type of a column: "float64", ["float32"] for a list, {"label": "string"} for a struct.
ColumnKind: TypeAlias = Any

# Longer rows become errors, so that a file without line breaks does not fill the memory.
MAX_ROW_BYTES = 64 << 20
_SKIPPED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """The position of rows in a file: the number of the first row, from 0 on, and its offset in the file's content."""

    row: int
    offset: int


@dataclass(frozen=True, slots=True)
class FileScan:
    """The result of scanning a file. `starts`: the place of every N-th row. `columns`: the columns of the
    whole file, or of its first rows; empty for an empty file.
    """

    rows: int
    starts: Sequence[Place]
    columns: Sequence[str]


class RowWriter(Protocol):
    def write(self, records: Sequence[Record]) -> None:
        """Adds rows."""

    def close(self) -> None:
        """Completes the file, which stays open."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of results. `kind`: for formats with types: the name of a type in Arrow, a list of one kind, a struct,
    or a type of Arrow itself.
    """

    name: str
    kind: ColumnKind = "string"


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    - `ending`: the ending of its files.
    - `scan`: gets a file and N.
    - `read`: gets a file, a place and the file's columns, and yields the rows from there on.
    - `open_writer`: gets an open file and columns.
    - `kinds`: returns the kinds of a file's columns, by their names; none for a format without types.

    `read` and `scan` raise SetupError if the file cannot be read.
    """

    ending: str
    scan: Callable[[BinaryIO, int], FileScan]
    read: Callable[[BinaryIO, Place, Sequence[str]], Iterator[InputRow]]
    open_writer: Callable[[BinaryIO, Sequence[Column]], RowWriter]
    kinds: Callable[[BinaryIO], Mapping[str, Any]] = lambda file: {}


def check_names(columns: list[str]) -> list[str]:
    """Returns the names of a file's columns. Raises SetupError if two columns have the same name."""
    if len(set(columns)) < len(columns):
        raise SetupError(f"the heading has a name twice: {', '.join(columns)}")
    return columns


def move_to(file: BinaryIO, offset: int) -> None:
    """Moves a file that was just opened to an offset; a file that cannot seek is read up to there."""
    if file.seekable():
        file.seek(offset)
    while not file.seekable() and offset > 0 and (skipped := file.read(min(offset, _SKIPPED_BYTES))):
        offset -= len(skipped)


def plain(value: Any) -> Any:
    """Converts values that JSON lacks: bytes to Base64, scalars of Arrow to values of Python, dates to text."""
    if hasattr(value, "as_py"):
        return _plain_of_arrow(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):  # not contiguous, or of a type that orjson does not write
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _plain_of_arrow(value: Any) -> Any:
    """Converts a scalar of Arrow to a value of Python; if there is none, to its parts, or its text."""
    try:
        # Python's own times have no nanoseconds; if pandas is installed, pyarrow returns its times.
        return (value.cast("string") if "[ns" in str(value.type) else value).as_py()
    except (ValueError, OverflowError, NotImplementedError) as error:
        if not value.is_valid:
            return None
        if isinstance(value, Mapping):
            return dict(value)
        if hasattr(value, "values"):
            return list(value.values)
        if isinstance(error, UnicodeDecodeError):
            return value.cast("binary").as_py().decode(errors="backslashreplace")
        # A time beyond the years 1 to 9999, or of a zone that this machine does not know.
        return str(value.cast("int64").as_py()) if getattr(value.type, "tz", None) else value.cast("string").as_py()


# Format → endings of its files.
ENDINGS = {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv",), "parquet": (".parquet", ".pq")}
# Ending → the name of the compression.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FORMATS = {
    "jsonl": ("text", "JSON_LINES"),
    "openai": ("text", "JSON_LINES"),
    "csv": ("text", "CSV"),
    "parquet": ("parquet", "PARQUET"),
}


def find_format(name: str) -> Format:
    """Returns a format by its name, and imports its libraries. Raises ModuleNotFoundError."""
    module, constant = _FORMATS[name]
    format: Format = getattr(importlib.import_module(f"{__name__}.{module}"), constant)
    return format


def format_of(file: str) -> str:
    """Returns the name of the format that a filename's ending stands for. Raises SetupError."""
    path = PurePosixPath(file)
    ending = (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix
    for name, endings in ENDINGS.items():
        if ending in endings:
            return name
    known = " ".join(ending for endings in ENDINGS.values() for ending in endings)
    advice = f"give --input-format, or one of the endings {known}, also with {' or '.join(COMPRESSIONS)} behind"
    raise SetupError(f"{file}: its name does not say its format; {advice}")
