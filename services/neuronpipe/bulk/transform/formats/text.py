"""JSON Lines and CSV.

JSON Lines: an object per line, in UTF-8; empty lines are no rows. CSV as in RFC 4180: a heading, quotes where they are
needed, UTF-8; lists and vectors are JSON in a cell.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import orjson

from neuronpipe.bulk.transform.formats import (
    MAX_ROW_BYTES,
    Column,
    FileScan,
    Format,
    InputRow,
    Place,
    Record,
    check_names,
    move_to,
    plain,
)
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import lines_of
from neuronpipe.core.parsing import too_much

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Maximum number of levels of a row. json reads about 980 levels, and writes somewhat fewer, as its caller is deeper in
# the stack.
_MOST_LEVELS = 500
# The number of rows whose fields count as the file's columns.
_SAMPLED = 100


class _JsonWriter:
    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._file = file

    def write(self, records: Sequence[Record]) -> None:
        self._file.write(b"".join(map(_line, records)))

    def close(self) -> None:
        self._file.flush()


def _scan_json(file: BinaryIO, step: int) -> FileScan:
    """See Format. Raises SetupError if the file is UTF-16, of which no row could be read."""
    rows = offset = 0
    starts: list[Place] = []
    columns: dict[str, None] = {}
    for line, size in lines_of(file, MAX_ROW_BYTES):
        if not offset and line.startswith(_UTF16_MARKS):
            raise SetupError("is UTF-16; rows must be UTF-8")
        if line.strip():
            if rows % step == 0:
                starts.append(Place(rows, offset))
            if rows < _SAMPLED and isinstance(row := _json_row(line), Mapping):
                columns |= dict.fromkeys(row)
            rows += 1
        offset += size
    return FileScan(rows, starts, list(columns))


def _read_json(file: BinaryIO, place: Place, columns: Sequence[str]) -> Iterator[InputRow]:
    move_to(file, place.offset)
    return (_json_row(line) for line, _ in lines_of(file, MAX_ROW_BYTES) if line.strip())


def _json_row(line: bytes) -> InputRow:
    if len(line) > MAX_ROW_BYTES:
        return f"is longer than {MAX_ROW_BYTES} bytes"
    if problem := too_much(line):
        return problem
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"is no valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"is no valid JSON: {error}"
    if line.count(b"[") + line.count(b"{") > _MOST_LEVELS and _is_too_deep(row):
        return f"is nested more than {_MOST_LEVELS} levels deep"
    return row if isinstance(row, dict) else "is no JSON object"


def _is_too_deep(row: Any) -> bool:
    level = [row]
    for _ in range(_MOST_LEVELS):
        lists = [value for value in level if isinstance(value, list)]
        lists += [list(value.values()) for value in level if isinstance(value, dict)]
        level = [value for values in lists for value in values]
    return bool(level)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _line(record: Record) -> bytes:
    try:
        return orjson.dumps(record, default=plain, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError:  # a kept value that orjson does not write: a whole number beyond 64 bits, half a surrogate pair
        values = ",".join(f"{json.dumps(name)}:{_json(value)}" for name, value in record.items())
        return f"{{{values}}}\n".encode()


def _json(value: Any) -> str:
    """Returns a value as JSON, also a value that orjson does not write."""
    try:
        return orjson.dumps(value, default=plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return json.dumps(value, default=plain, separators=(",", ":"))


JSON_LINES = Format(".jsonl", _scan_json, _read_json, _JsonWriter)


# Maximum number of cells of a record of CSV. csv.reader makes a list of all cells before it returns.
_MAX_CELLS = 1 << 18
# Bytes of text that is not UTF-8, as PEP 383 decodes them.
_STRAY = re.compile("[\udc80-\udcff]")


class _Records:
    """The records of a file, and the offset behind the last record. csv.reader takes no line before it needs it."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        csv.field_size_limit(MAX_ROW_BYTES)  # a limit of the module, 128 KiB by default
        self.offset = offset
        self._left = MAX_ROW_BYTES, _MAX_CELLS
        self._reader = csv.reader(self._text(file), strict=True)

    def next(self) -> list[str] | str | None:
        """Returns the next record, or its problem; None at the end. Raises SetupError if a quote does not end."""
        self._left = MAX_ROW_BYTES, _MAX_CELLS
        try:
            for record in self._reader:
                if record:
                    return record
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                raise SetupError(
                    f"a quote is not closed, or a cell is longer than {MAX_ROW_BYTES} bytes, before byte {self.offset}"
                ) from None
            return f"is no valid CSV: {error}"
        return None

    def _text(self, file: BinaryIO) -> Iterator[str]:
        for line, size in lines_of(file, MAX_ROW_BYTES):
            text = line if self.offset else line.removeprefix(codecs.BOM_UTF8)
            self.offset += size
            self._left = self._left[0] - size, self._left[1] - line.count(b",")
            if min(self._left) < 0:
                raise SetupError(
                    f"a row is longer than {MAX_ROW_BYTES} bytes, or has more than {_MAX_CELLS} cells, before byte "
                    f"{self.offset}; it may be a quote that is not closed"
                )
            yield text.decode(errors="surrogateescape")


class _CsvWriter:
    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]
        self._file = file
        self.write([{name: name for name in self._names}])

    def write(self, records: Sequence[Record]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(
            [_cell(record[name]) for name in self._names] for record in records
        )
        self._file.write(text.getvalue().encode(errors="backslashreplace"))

    def close(self) -> None:
        self._file.flush()


def _scan_csv(file: BinaryIO, step: int) -> FileScan:
    """See Format. Raises SetupError if the heading is invalid."""
    records = _Records(file)
    heading = records.next()
    if heading is None:
        return FileScan(0, (), ())
    columns = _columns(heading)
    rows, starts, offset = 0, list[Place](), records.offset
    while records.next() is not None:
        if rows % step == 0:
            starts.append(Place(rows, offset))
        rows += 1
        offset = records.offset
    return FileScan(rows, starts, columns)


def _columns(heading: list[str] | str) -> list[str]:
    if isinstance(heading, str):
        raise SetupError(f"the heading {heading}")
    if any(map(_STRAY.search, heading)):
        raise SetupError("the heading is not UTF-8")
    return check_names(heading)


def _read_csv(file: BinaryIO, place: Place, columns: Sequence[str]) -> Iterator[InputRow]:
    move_to(file, place.offset)
    records = _Records(file, place.offset)
    while (record := records.next()) is not None:
        yield record if isinstance(record, str) else _csv_row(record, columns)


def _csv_row(record: list[str], columns: Sequence[str]) -> InputRow:
    if any(not cell.isascii() and _STRAY.search(cell) for cell in record):
        return "is not UTF-8"
    if len(record) != len(columns):
        return f"has {len(record)} cells, the heading has {len(columns)}"
    return dict(zip(columns, record, strict=True))


def _cell(value: Any) -> Any:
    """Returns a text or a number as it is, and any other value as JSON."""
    value = plain(value) if hasattr(value, "as_py") else value
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value
    text = _json(value)
    return text[1:-1] if text.startswith('"') else text


CSV = Format(".csv", _scan_csv, _read_csv, _CsvWriter)
