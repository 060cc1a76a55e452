"""CSV as RFC 4180 has it: a heading, quotes where they are needed, UTF-8. Lists and vectors are JSON in a cell."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

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

_MARK = b"\xef\xbb\xbf"
# Bytes of text that is not UTF-8, as PEP 383 decodes them.
_STRAY = re.compile("[\udc80-\udcff]")


class _Records:
    """The records of a file, and the offset behind the last one. csv.reader takes no line before it needs it."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        csv.field_size_limit(MAX_ROW_BYTES)  # a limit of the module's, 128 KiB otherwise
        self.offset = offset
        self._reader = csv.reader(self._text(file), strict=True)

    def next(self) -> list[str] | str | None:
        """The next record, or what is wrong with it; None at the end. Raises SetupError for a quote without an end."""
        try:
            for record in self._reader:
                if record:
                    return record
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                raise SetupError(f"a quote is not closed; it may be that before byte {self.offset}") from None
            return f"is no valid CSV: {error}"
        return None

    def _text(self, file: BinaryIO) -> Iterator[str]:
        for line, size in lines(file):
            text = line if self.offset else line.removeprefix(_MARK)
            self.offset += size
            yield text.decode(errors="surrogateescape")


class _Reader:
    def __init__(self, file: BinaryIO, place: Place, columns: Sequence[str]) -> None:
        self._file = file
        self._columns = columns
        move_to(file, place.offset)
        self._records = _Records(file, place.offset)

    def read(self, count: int) -> list[Row]:
        """See RowReader."""
        found: list[Row] = []
        while len(found) < count and (record := self._records.next()) is not None:
            found.append(record if isinstance(record, str) else self._row(record))
        return found

    def close(self) -> None:
        """See RowReader."""
        self._file.close()

    def _row(self, record: list[str]) -> Row:
        if any(not cell.isascii() and _STRAY.search(cell) for cell in record):
            return "is not UTF-8"
        if len(record) != len(self._columns):
            return f"has {len(record)} cells, the heading has {len(self._columns)}"
        return dict(zip(self._columns, record, strict=True))


class _Writer:
    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]
        self._file = file
        self.write([{name: name for name in self._names}])

    def write(self, records: Sequence[Record]) -> None:
        """See RowWriter."""
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(
            [_cell(record[name]) for name in self._names] for record in records
        )
        self._file.write(text.getvalue().encode(errors="backslashreplace"))

    def close(self) -> None:
        """See RowWriter."""
        self._file.flush()


def _scan(file: BinaryIO, step: int) -> FileScan:
    """See Format. Raises SetupError for a heading that is none."""
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
    if len(set(heading)) < len(heading):
        raise SetupError(f"the heading has a name twice: {', '.join(heading)}")
    return heading


def _cell(value: Any) -> Any:
    """A text or a number; what is neither as JSON."""
    value = plain(value) if hasattr(value, "as_py") else value
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value
    text = orjson.dumps(value, default=plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return text[1:-1] if text.startswith('"') else text


FORMAT = Format(".csv", _scan, _Reader, _Writer)
