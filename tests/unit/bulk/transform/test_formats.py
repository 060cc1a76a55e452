"""transform/formats: every format reads what it wrote, from any place on, and names what is no row."""

import gzip
import io
import itertools
import json
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from neuronpipe.bulk.transform.files import find_inputs, naming, open_input
from neuronpipe.bulk.transform.formats import Column, FileScan, InputRow, find_format, format_of
from neuronpipe.core.errors import SetupError

_TEXTS = ["plain", 'a "quote", a comma', "two\nlines", "ünï — 語", "", "x" * 200_000]


def _scan(file: Path, format: str, step: int) -> FileScan:
    with naming(str(file)), open_input(str(file)) as opened:
        return find_format(format).scan(opened, step)


def _read(file: Path, format: str, step: int = 2) -> list[list[InputRow]]:
    """The rows from each place on, `step` of them."""
    scan = _scan(file, format, step)
    found = []
    for place in scan.starts:
        with open_input(str(file)) as opened:
            found.append(list(itertools.islice(find_format(format).read(opened, place, scan.columns), step)))
    return found


def _write(file: Path, format: str, columns: Sequence[Column], records: Sequence[dict[str, Any]]) -> None:
    with file.open("wb") as opened:
        writer = find_format(format).open_writer(opened, columns)
        writer.write(records[:1])
        writer.write(records[1:])
        writer.close()


def _mapping(row: InputRow) -> dict[str, Any]:
    assert not isinstance(row, str)
    return dict(row)


def _plain(row: InputRow) -> Any:
    return (
        row
        if isinstance(row, str)
        else {name: value.as_py() if hasattr(value, "as_py") else value for name, value in row.items()}
    )


def _parquet(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("step", [1, 2, 4, 100])
def test_a_format_reads_what_it_wrote_from_any_place_on(format: str, step: int, tmp_path: Path) -> None:
    records = [{"id": str(number), "text": text} for number, text in enumerate(_TEXTS)]
    _write(tmp_path / "rows", format, [Column("id"), Column("text")], records)
    assert [_plain(row) for part in _read(tmp_path / "rows", format, step) for row in part] == records
    assert _scan(tmp_path / "rows", format, step).columns == ["id", "text"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_are_read_from_any_place_on(ending: str, tmp_path: Path) -> None:
    content = b"".join(b'{"n":%d}\n' % number for number in range(1000))
    file = tmp_path / f"rows.jsonl{ending}"
    if ending == ".gz":
        file.write_bytes(gzip.compress(content))
    else:
        with pyarrow.CompressedOutputStream(str(file), "zstd") as stream:
            stream.write(content)
    rows = [row for part in _read(file, "jsonl", 300) for row in part]
    assert rows == [{"n": number} for number in range(1000)]
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(SetupError, match=r"rows\.jsonl.*damaged"):
        _scan(file, "jsonl", 300)


def test_parquet_keeps_types(tmp_path: Path) -> None:
    """Nanoseconds, decimals and lists are written as they were read."""
    table = pyarrow.table(
        {
            "time": pyarrow.array([1, 2, None], pyarrow.timestamp("ns")),
            "price": [Decimal("1.50"), None, Decimal("2.25")],
            "tags": [["a"], [], None],
            "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    parquet.write_table(table, tmp_path / "in")
    with (tmp_path / "in").open("rb") as opened:
        kinds = find_format("parquet").kinds(opened)
    columns = [Column(name, kind) for name, kind in kinds.items()]
    (rows,) = _read(tmp_path / "in", "parquet", 100)
    _write(tmp_path / "out", "parquet", columns, [dict(row) for row in rows if not isinstance(row, str)])
    assert parquet.read_table(tmp_path / "out").equals(parquet.read_table(tmp_path / "in"))


def test_what_is_no_json_row_is_named(tmp_path: Path) -> None:
    lines = [b'{"a":1}', b"", b"{", b"[1]", b'{"a":"\xff"}', b'{"a":NaN}', b"[" * 100_000, b'\xef\xbb\xbf{"a":2}\r']
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    (rows,) = _read(tmp_path / "rows.jsonl", "jsonl", 100)
    assert rows[0] == {"a": 1}
    assert str(rows[1]).startswith("is no valid JSON")
    assert rows[2] == "is no JSON object"
    assert rows[3] == "is not UTF-8: byte 7"
    assert "NaN" in str(rows[4])
    assert "is no valid JSON" in str(rows[5])
    assert rows[6] == {"a": 2}
    assert len(rows) == 7


def test_a_row_that_is_nested_too_deeply_to_be_written_is_named(tmp_path: Path) -> None:
    lines = [b'{"a":' + b"[" * levels + b"]" * levels + b"}" for levels in (499, 500, 900)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    (rows,) = _read(tmp_path / "rows.jsonl", "jsonl", 100)
    assert isinstance(rows[0], dict)
    assert rows[1:] == ["is nested more than 500 levels deep"] * 2


def test_what_is_no_csv_row_is_named(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf"id",text\r\n1,a\r\n\r\n2\r\n3,"x"y\r\n4,caf\xe9\r\n5,"b\nc"\r\n'
    (tmp_path / "rows.csv").write_bytes(content)
    (rows,) = _read(tmp_path / "rows.csv", "csv", 100)
    assert rows[0] == {"id": "1", "text": "a"}
    assert rows[1] == "has 1 cells, the heading has 2"
    assert str(rows[2]).startswith("is no valid CSV")
    assert rows[3] == "is not UTF-8"
    assert rows[4] == {"id": "5", "text": "b\nc"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b'a,b\n1,"never closed\n', "quote is not closed"),
        ("rows.csv", b"a,a\n", "a name twice"),
        ("rows.csv", b"caf\xe9\n", "heading is not UTF-8"),
        ("rows.jsonl", "{}\n".encode("utf-16"), "UTF-16"),
        ("rows.parquet", b"PAR1 but not really", "no Parquet file"),
        ("rows.parquet", _parquet(pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, ["a", "a"])), "a name twice"),
        ("rows.jsonl.gz", b"no gzip", "damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError, match=rf"{name}.*{message}"):
        _scan(tmp_path / name, format_of(name), 10)


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_file_without_rows_has_none(format: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"")
    assert _scan(tmp_path / "rows", format, 10).rows == 0


def test_json_writes_what_orjson_does_not(tmp_path: Path) -> None:
    """Whole numbers beyond 64 bits and half surrogate pairs stay as they are beside a vector."""
    record = {"big": 2**80, "half": "\ud800", "bytes": b"\x00\xff", "vector": np.array([0.1, 1], np.float32)}
    _write(tmp_path / "rows", "jsonl", [Column(name) for name in record], [record])
    line = (tmp_path / "rows").read_text()
    assert json.loads(line) == {"big": 2**80, "half": "\ud800", "bytes": "AP8=", "vector": [0.1, 1.0]}


_NESTED: Any = "x"
for _ in range(300):  # orjson writes 254 levels
    _NESTED = [_NESTED]
_ODD = {"big": [2**80], "half": ["\ud800"], "half name": {"\ud800": 1}, "half text": "\ud800", "deep": _NESTED}


@pytest.mark.parametrize("value", _ODD.values(), ids=_ODD)
@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_any_value_of_a_row_of_json_is_kept(format: str, value: Any, tmp_path: Path) -> None:
    _write(tmp_path / "rows", format, [Column("kept")], [{"kept": value}])
    ((row,),) = _read(tmp_path / "rows", format)
    kept = _plain(row)["kept"]
    as_text = value.encode(errors="backslashreplace").decode() if isinstance(value, str) else None
    assert kept in (value, as_text) or json.loads(kept) == value


_FAR_US = 9 * 10**17  # microseconds: the year 30489
_MADE = pyarrow.array([b"a\xff"]).view("string")  # no UTF-8, which Arrow does not check


@pytest.mark.parametrize(
    ("array", "written"),
    [
        (pyarrow.array([_FAR_US], pyarrow.timestamp("us")), "30489-11-11 16:00:00.000000"),
        (pyarrow.array([[_FAR_US]], pyarrow.list_(pyarrow.timestamp("us"))), ["30489-11-11 16:00:00.000000"]),
        (pyarrow.array([{"t": 1}], pyarrow.struct([("t", pyarrow.time64("ns"))])), {"t": "00:00:00.000000001"}),
        (pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.time64("ns"))), None),
        (pyarrow.array([None], pyarrow.list_(pyarrow.time64("ns"))), None),
        (pyarrow.array([1], pyarrow.timestamp("ms", "Mars/Olympus")), "1"),
        (_MADE, "a\\xff"),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_parquet_s_values_that_python_lacks_are_kept(array: pyarrow.Array, written: Any, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"kept": array}), tmp_path / "in")
    ((row,),) = _read(tmp_path / "in", "parquet")
    for format in ("jsonl", "csv", "parquet"):
        _write(tmp_path / format, format, [Column("kept", array.type)], [_mapping(row)])
    assert parquet.read_table(tmp_path / "parquet")["kept"].chunk(0).equals(array)
    in_json = json.loads((tmp_path / "jsonl").read_text())["kept"]
    assert in_json == written or (pyarrow.types.is_map(array.type) and "00:00:00.000000001" in str(in_json))
    ((in_csv,),) = _read(tmp_path / "csv", "csv")
    assert _mapping(in_csv)["kept"] == (
        in_json if isinstance(in_json, str) else json.dumps(in_json, separators=(",", ":")) if in_json else ""
    )


def test_csv_writes_lists_as_json(tmp_path: Path) -> None:
    record = {"a": [1.5, "x"], "b": True, "c": None, "d": 0.1}
    _write(tmp_path / "rows", "csv", [Column(name) for name in record], [record])
    assert (tmp_path / "rows").read_text() == 'a,b,c,d\n"[1.5,""x""]",true,,0.1\n'


def test_an_input_that_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(SetupError, match=r"--input .*rows\.jsonl: is no regular file"):
        find_inputs([str(tmp_path / "*.jsonl")])


def test_inputs_are_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "notes.txt"):
        (tmp_path / name).touch()
    found = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl")]
    assert find_inputs([str(tmp_path)]) == found
    assert find_inputs([str(tmp_path / "*.jsonl*"), str(tmp_path / "b.jsonl")]) == found
    with pytest.raises(SetupError, match="no such file"):
        find_inputs([str(tmp_path / "*.csv")])
    with pytest.raises(SetupError, match="--input-format"):
        format_of("rows.txt")


def test_a_row_of_json_with_more_values_than_a_message_may_have_is_named(tmp_path: Path) -> None:
    """200,000 objects of three bytes each would take 200 MB, where a text with as many bytes takes 0.6 MB."""
    lines = [b'{"a":[%s{}]}' % (b"{}," * 200_000), b'{"a":"%s"}' % (b"a, b" * 50_000)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    (rows,) = _read(tmp_path / "rows.jsonl", "jsonl", 100)
    assert rows[0] == "holds too many values: they would take more than 16 MiB, the limit"
    assert rows[1] == {"a": "a, b" * 50_000}


@pytest.mark.parametrize("cell", [b"ab,", b'"a\n",'], ids=["on a line", "over many lines"])
def test_a_row_of_csv_with_more_cells_than_are_held_at_once_ends_the_run(cell: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text\nx\n" + cell * 300_000 + b"y\n")
    with pytest.raises(SetupError, match=r"rows\.csv: a row is longer than .* bytes, or has more than 262144 cells"):
        _scan(tmp_path / "rows.csv", "csv", 100)


def test_a_few_rows_of_parquet_are_in_memory_at_once(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [os.urandom(1000) * 64 for _ in range(1024)]})
    parquet.write_table(table, tmp_path / "rows", write_batch_size=16)  # so that pages have a megabyte
    del table
    before_bytes = pyarrow.total_allocated_bytes()
    with (tmp_path / "rows").open("rb") as opened:
        scan = find_format("parquet").scan(opened, 2000)
        rows = find_format("parquet").read(opened, scan.starts[0], scan.columns)
        for _, row in zip(range(100), rows, strict=False):
            assert row
        assert pyarrow.total_allocated_bytes() - before_bytes < 16 << 20
