"""JSON Lines: an object a line, in UTF-8. Empty lines are no rows."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import orjson

from neuronpipe.bulk.transform.formats.base import (
    MAX_ROW_BYTES,
    Column,
    FileScan,
    Format,
    Place,
    Record,
    Row,
    lines,
    move_to,
    plain,
)
from neuronpipe.core.errors import SetupError

_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Rows whose fields count as the file's columns.
_SAMPLED = 100


class _Reader:
    def __init__(self, file: BinaryIO, place: Place, columns: Sequence[str]) -> None:
        self._file = file
        move_to(file, place.offset)
        self._lines = lines(file)

    def read(self, count: int) -> list[Row]:
        """See RowReader."""
        found: list[Row] = []
        while len(found) < count and (found_line := next(self._lines, None)) is not None:
            if found_line[0].strip():
                found.append(_row(found_line[0]))
        return found

    def close(self) -> None:
        """See RowReader."""
        self._file.close()


class _Writer:
    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._file = file

    def write(self, records: Sequence[Record]) -> None:
        """See RowWriter."""
        self._file.write(b"".join(map(_line, records)))

    def close(self) -> None:
        """See RowWriter."""
        self._file.flush()


def _scan(file: BinaryIO, step: int) -> FileScan:
    """See Format. Raises SetupError for UTF-16, which no row could be read of."""
    rows = offset = 0
    starts: list[Place] = []
    columns: dict[str, None] = {}
    for line, size in lines(file):
        if not offset and line.startswith(_UTF16_MARKS):
            raise SetupError("is UTF-16; rows must be UTF-8")
        if line.strip():
            if rows % step == 0:
                starts.append(Place(rows, offset))
            if rows < _SAMPLED and isinstance(row := _row(line), Mapping):
                columns |= dict.fromkeys(row)
            rows += 1
        offset += size
    return FileScan(rows, starts, list(columns))


def _row(line: bytes) -> Row:
    if len(line) > MAX_ROW_BYTES:
        return f"is longer than {MAX_ROW_BYTES} bytes"
    try:
        row = json.loads(line.removeprefix(_UTF8_MARK).decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"is no valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"is no valid JSON: {error}"
    return row if isinstance(row, dict) else "is no JSON object"


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _line(record: Record) -> bytes:
    try:
        return orjson.dumps(record, default=plain, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError:  # a kept value that orjson does not write: a whole number beyond 64 bits, half a surrogate pair
        values: dict[str, Any] = {name: _written(value) for name, value in record.items()}
        return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _written(value: Any) -> Any:
    """A value that json can write."""
    try:
        return orjson.loads(orjson.dumps(value, default=plain, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError:
        return value


FORMAT = Format(".jsonl", _scan, _Reader, _Writer)
