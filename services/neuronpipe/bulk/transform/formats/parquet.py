"""Parquet, by pyarrow. Columns have types; a kept column of a Parquet file keeps its own type."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow
from pyarrow import parquet

from neuronpipe.bulk.transform.formats import Column, ColumnKind, FileScan, Format, InputRow, Place, Record, check_names
from neuronpipe.core.errors import SetupError

# Rows and bytes that are read at once, because each row may have an image; and rows of a row group that is written.
_READ_ROWS, _READ_BYTES = 64, 1 << 20
_GROUP_ROWS = 65_536


class _Writer:
    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._schema = pyarrow.schema([(column.name, _type(column.kind)) for column in columns])
        self._file = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._batches: list[pyarrow.RecordBatch] = []
        self._rows = 0

    def write(self, records: Sequence[Record]) -> None:
        arrays = [_array([record[field.name] for record in records], field.type) for field in self._schema]
        self._batches.append(pyarrow.record_batch(arrays, self._schema))
        self._rows += len(records)
        if self._rows >= _GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """See RowWriter."""
        try:
            self._write_group()
            self._file.close()
        finally:
            self._file.is_open = False  # otherwise its __del__ would try again

    def _write_group(self) -> None:
        if self._batches:
            self._file.write_table(pyarrow.Table.from_batches(self._batches, self._schema))
        self._batches, self._rows = [], 0


def _open(file: BinaryIO) -> Any:
    try:
        return parquet.ParquetFile(file, buffer_size=_READ_BYTES)
    except (pyarrow.ArrowException, OSError) as error:
        raise SetupError("is no Parquet file that pyarrow can read") from error


def _scan(file: BinaryIO, step: int) -> FileScan:
    """See Format. A place's offset is the number of the first row of its row group."""
    metadata = _open(file).metadata
    counts = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    groups = [0, *itertools.accumulate(counts)]
    places = [Place(row, max(start for start in groups if start <= row)) for row in range(0, metadata.num_rows, step)]
    return FileScan(metadata.num_rows, places, check_names(metadata.schema.to_arrow_schema().names))


def _read(file: BinaryIO, place: Place, columns: Sequence[str]) -> Iterator[InputRow]:
    """Yields the rows from a place on, as scalars of Arrow, which keep their type."""
    return itertools.islice(_rows(_open(file), place.offset), place.row - place.offset, None)


def _rows(file: Any, first_row: int) -> Iterator[InputRow]:
    """Yields the rows of the row groups from the group that begins with a row on."""
    first = 0
    try:
        for group in range(file.metadata.num_row_groups):
            if first >= first_row:
                for batch in file.iter_batches(_READ_ROWS, row_groups=[group]):
                    names = batch.schema.names
                    yield from (dict(zip(names, row, strict=True)) for row in zip(*batch.columns, strict=True))
            first += file.metadata.row_group(group).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise SetupError(f"cannot be read: {error}") from error


def _kinds(file: BinaryIO) -> Mapping[str, ColumnKind]:
    schema = _open(file).schema_arrow
    return {field.name: field.type for field in schema}


def _type(kind: ColumnKind) -> Any:
    if isinstance(kind, list):
        return pyarrow.list_(_type(kind[0]))
    if isinstance(kind, dict):
        return pyarrow.struct([(name, _type(part)) for name, part in kind.items()])
    return getattr(pyarrow, kind)() if isinstance(kind, str) else kind


def _array(values: list[Any], type: Any) -> Any:
    if pyarrow.types.is_string(type):
        values = [_text(value) for value in values]
    elif any(isinstance(value, pyarrow.Scalar) for value in values) and (
        pyarrow.types.is_nested(type) or pyarrow.types.is_dictionary(type)  # no arrays are made of such scalars
    ):
        arrays = [pyarrow.nulls(1, type) if value is None else pyarrow.repeat(value, 1) for value in values]
        return pyarrow.concat_arrays(arrays)
    return pyarrow.array(values, type)


def _text(value: Any) -> Any:
    """Returns a value of a column of texts: a value of JSON that is no text is kept as JSON."""
    if value is None or isinstance(value, pyarrow.Scalar):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair


PARQUET = Format(".parquet", _scan, _read, _Writer, _kinds)
