"""Cuts the input into shards, tells one run from another, and records which shards are complete.

A shard's file appears after its results. So what is listed is there, whoever wrote it, on this machine or another one,
and no file is ever added to.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from neuronpipe.bulk.transform.files import Folder, digest, local_copy, naming, open_input, write_file
from neuronpipe.bulk.transform.formats import Column, Format, Kind, Place, find_format, format_of
from neuronpipe.bulk.transform.request import ModelFacts, TransformRequest
from neuronpipe.core.errors import SetupError

RUN_FILE = "_run.json"
MANIFEST_FILE = "_manifest.jsonl"
_SHARDS = "_shards"


@dataclass(frozen=True, slots=True)
class DoneShard:
    """A shard whose results are complete. `first_row`: in its file, from 0 on. Tokens: of rows that succeeded."""

    number: int
    file: str
    size_bytes: int
    input: str
    first_row: int
    rows: int
    errors: int
    tokens: int
    truncated_tokens: int
    padded_tokens: int


class Manifest:
    """The list of a run's shards, in its output folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def begin(self, fingerprint: str, description: dict[str, object]) -> None:
        """Begins a run, or goes on with it. Raises SetupError for a folder of another run, naming what differs."""
        new = {"fingerprint": fingerprint, **description}
        if (content := self._folder.read(RUN_FILE)) is None:
            write_file(self._folder, RUN_FILE, (json.dumps(new, indent=2) + "\n").encode())
            return
        old = json.loads(content)
        if old.get("fingerprint") != fingerprint:
            changed = [name for name in new if name != "fingerprint" and new[name] != old.get(name)]
            raise SetupError(
                f"holds a run that differs in {', '.join(changed) or 'its input'}; choose another folder, or delete it"
            )

    def add(self, shard: DoneShard) -> None:
        """Lists a shard whose file of results is there. Raises SetupError."""
        write_file(self._folder, f"{_SHARDS}/{shard.number:05d}.json", _line(shard))

    def done(self) -> list[DoneShard]:
        """The shards that are listed, and whose results are there, in order. Raises SetupError."""
        listed = [
            DoneShard(**json.loads(self._folder.read(name) or b""))
            for name in self._folder.names(_SHARDS)
            if name.endswith(".json")
        ]
        sizes = self._folder.sizes([shard.file for shard in listed])
        found = [shard for shard in listed if sizes.get(shard.file) == shard.size_bytes]
        return sorted(found, key=lambda shard: shard.number)

    def complete(self, shards: Sequence[DoneShard]) -> None:
        """Writes the list of all shards into one file. Raises SetupError."""
        write_file(self._folder, MANIFEST_FILE, b"".join(map(_line, shards)))


def _line(shard: DoneShard) -> bytes:
    return json.dumps(asdict(shard)).encode() + b"\n"


# Of the fingerprint. A change in how rows are read, batches are made or results are written needs a new one.
_FORM = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Neighbouring rows of one file, which become one file of results."""

    number: int
    file: str
    place: Place
    rows: int
    columns: Sequence[str]

    def name(self, ending: str) -> str:
        """The name of its file of results."""
        return f"part-{self.number:05d}{ending}"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input. `digest`: SHA-256 of the file as it is stored."""

    file: str
    digest: str
    rows: int


@dataclass(frozen=True, slots=True)
class Input:
    """All rows: the files, cut into shards. `kinds`: of columns that have types, by their names."""

    format: str
    files: Sequence[InputFile]
    shards: Sequence[Shard]
    columns: Sequence[str]
    kinds: Mapping[str, Kind]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(shard.rows for shard in self.shards)


def scan_input(files: Sequence[str], format_name: str, shard_rows: int) -> Input:
    """Reads all files once. `format_name`: empty where the files' names say it. Raises SetupError."""
    names = {format_name or format_of(file) for file in files}
    if len(names) > 1:
        raise SetupError(f"--input: files of several formats ({', '.join(sorted(names))}); give those of one in a run")
    (name,) = names
    format = find_format(name)
    found: list[InputFile] = []
    shards: list[Shard] = []
    columns: dict[str, None] = {}
    kinds: dict[str, Kind] = {}
    for file in files:
        with naming(file), local_copy(file) as copy:
            with open_input(copy) as opened:
                scan = format.scan(opened, shard_rows)
            if scan.rows:
                kinds |= _kinds(format, copy, kinds)
            mark = digest(copy)
        columns |= dict.fromkeys(scan.columns)
        for place in scan.starts:
            rows = min(shard_rows, scan.rows - place.row)
            shards.append(Shard(len(shards), file, place, rows, scan.columns))
        found.append(InputFile(file, mark, scan.rows))
    return Input(name, found, shards, list(columns), kinds)


def _kinds(format: Format, file: str, known: Mapping[str, Kind]) -> Mapping[str, Kind]:
    with open_input(file) as opened:
        kinds = format.kinds(opened)
    for column, kind in kinds.items():
        if known.get(column, kind) != kind:
            raise SetupError(f"column {column!r} is {kind}, in a file before it is {known[column]}")
    return kinds


def kept_columns(request: TransformRequest, input: Input) -> list[Column]:
    """The columns that results are joined to. Raises SetupError for one that no file has."""
    return [Column(name, input.kinds.get(name, "string")) for name in request.keep if _has(input, name, "--keep")]


def check_columns(fields: Mapping[str, str], input: Input) -> None:
    """Raises SetupError for columns of a task's fields that no file has."""
    for field, column in fields.items():
        _has(input, column, "--column", f"; name the column of {field!r} by --column {field}=COLUMN")


def _has(input: Input, column: str, option: str, hint: str = "") -> bool:
    if input.rows and column not in input.columns:
        raise SetupError(f"{option}: the input has no column {column!r}, it has: {', '.join(input.columns)}{hint}")
    return True


def fingerprint(request: TransformRequest, input: Input, model: ModelFacts, output_format: str) -> str:
    """What two runs have in common if the same command would write the same files: input, model and options."""
    parts = {
        "form": _FORM,
        "input": [(file.digest, file.rows) for file in input.files],
        "input_format": input.format,
        "output_format": output_format,
        "model": {**asdict(model), "tasks": None},
        "task": request.task,
        "columns": dict(request.columns),
        "keep": list(request.keep),
        "options": json.loads(request.options),
        "prefix": request.prefix,
        "shard_rows": request.shard_rows,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
