"""A whole run: cuts the input into shards, continues an earlier run, shows its progress, and reports."""

import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.files import (
    digest,
    find_inputs,
    local_copy,
    mark_of,
    naming,
    open_folder,
    open_input,
    write_file,
)
from neuronpipe.bulk.transform.formats import Column, ColumnKind, Format, find_format, format_of
from neuronpipe.bulk.transform.request import Engine, ModelFacts, TransformRequest
from neuronpipe.bulk.transform.rows import OpenAiRows, RowTask, TaskRows
from neuronpipe.bulk.transform.shards import (
    NAMED_ERRORS,
    DoneShard,
    RowError,
    RowProgress,
    Shard,
    ShardManifest,
    ShardWork,
    run_shards,
)
from neuronpipe.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input. `digest`: SHA-256 of the file as it is stored."""

    file: str
    digest: str
    rows: int


@dataclass(frozen=True, slots=True)
class TransformInput:
    """All rows: the files, cut into shards. `kinds`: the types of columns, by name."""

    format: str
    files: Sequence[InputFile]
    shards: Sequence[Shard]
    columns: Sequence[str]
    kinds: Mapping[str, ColumnKind]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def scan_input(files: Sequence[str], format_name: str, shard_rows: int) -> TransformInput:
    """Reads all files once. `format_name`: empty if the filenames say it. Raises SetupError."""
    names = {format_name or format_of(file) for file in files}
    if len(names) > 1:
        raise SetupError(f"--input: files of several formats ({', '.join(sorted(names))}); give those of one in a run")
    (name,) = names
    format = find_format(name)
    input_files: list[InputFile] = []
    shards: list[Shard] = []
    columns: dict[str, None] = {}
    kinds: dict[str, ColumnKind] = {}
    for file in files:
        with naming(file):
            mark = mark_of(file)
        with naming(file), local_copy(file) as copy:
            with open_input(copy) as opened:
                scan = format.scan(opened, shard_rows)
            if scan.rows:
                kinds |= _kinds(format, copy, kinds)
            sha256 = digest(copy)
        columns |= dict.fromkeys(scan.columns)
        for place in scan.starts:
            rows = min(shard_rows, scan.rows - place.row)
            shards.append(Shard(len(shards), file, mark, place, rows, scan.columns))
        input_files.append(InputFile(file, sha256, scan.rows))
    return TransformInput(name, input_files, shards, list(columns), kinds)


def _kinds(format: Format, file: str, kinds_so_far: Mapping[str, ColumnKind]) -> Mapping[str, ColumnKind]:
    with open_input(file) as opened:
        kinds = format.kinds(opened)
    for column, kind in kinds.items():
        if kinds_so_far.get(column, kind) != kind:
            raise SetupError(f"column {column!r} is {kind}, in a file before it is {kinds_so_far[column]}")
    return kinds


def _check_column(input: TransformInput, column: str, option: str, hint: str = "") -> None:
    if input.rows and column not in input.columns:
        column_names = ", ".join(input.columns) or "none, as none of its first rows is a JSON object"
        raise SetupError(f"{option}: the input has no column {column!r}, it has: {column_names}{hint}")


_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S = 0.5, 30.0


class TooManyErrors(Exception):
    """More rows failed than allowed."""


class RunProgress:
    """Counts rows, and shows them on standard error from time to time."""

    def __init__(self, rows: int, done: Sequence[DoneShard], max_errors: int | None) -> None:
        """`rows`: the number of rows of the input. `done`: shards of an earlier run, which this run continues."""
        self.errors: list[RowError] = []
        self.rows = 0
        self._total = rows
        self._resumed = sum(shard.rows for shard in done)
        self._failed = sum(shard.errors for shard in done)
        self._max_errors = max_errors
        self._began_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = self._began_s
        self._is_shown = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def note(self, progress: RowProgress) -> None:
        """Counts rows. Raises TooManyErrors."""
        self.rows += progress.rows
        self._failed += progress.errors
        self.errors += progress.named_errors[: NAMED_ERRORS - len(self.errors)]
        if self._max_errors is not None and self._failed > self._max_errors:
            examples = "; ".join(f"{error.file} row {error.row}: {error.message}" for error in self.errors)
            raise TooManyErrors(f"{self._failed} rows failed, --max-errors is {self._max_errors}: {examples}")
        interval_s = _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        if time.monotonic() >= self._shown_s + interval_s:
            self._shown_s = time.monotonic()
            self._show()

    def end(self) -> None:
        """Leaves the line that was shown last."""
        if self._is_terminal and self._is_shown:
            self._show()
            self._write("\n")

    def _show(self) -> None:
        done, rate = self._resumed + self.rows, self.rows / max(self.seconds, 1e-9)
        share = f"{done / self._total:.1%}" if self._total else "100 %"
        remaining = _duration((self._total - done) / rate) if rate else "?"
        line = (
            f"{done:,} of {self._total:,} rows ({share}), {rate:,.0f} rows/s, {remaining} left, {self._failed:,} failed"
        )
        self._is_shown = True
        self._write(f"\r{line}\033[K" if self._is_terminal else f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class TransformReport:
    """The figures of a run.

    `seconds`, `rows_per_s`, `tokens_per_s` and `cost` are figures of this command alone. Rows, errors and tokens are
    figures of all shards, also shards of an earlier run. `padding`: the share of computed tokens that was padding.
    """

    model: str
    rows: int
    errors: int
    shards: int
    resumed_rows: int
    seconds: float
    rows_per_s: float
    tokens: int
    tokens_per_s: float
    truncated_tokens: int
    padding: float
    cost: float | None
    cost_per_million_rows: float | None


def make_report(
    model: str, shards: Sequence[DoneShard], new: Sequence[DoneShard], seconds: float, price_per_hour: float
) -> TransformReport:
    """Returns the figures. `new`: the shards of this command."""

    def total(field: str, of: Sequence[DoneShard] = shards) -> int:
        return sum(getattr(shard, field) for shard in of)

    rows, new_rows, tokens, padded = total("rows"), total("rows", new), total("tokens"), total("padded_tokens")
    cost = price_per_hour * seconds / 3600 if price_per_hour else None
    return TransformReport(
        model=model,
        rows=rows,
        errors=total("errors"),
        shards=len(shards),
        resumed_rows=rows - new_rows,
        seconds=round(seconds, 3),
        rows_per_s=round(new_rows / max(seconds, 1e-9), 1),
        tokens=tokens,
        tokens_per_s=round(total("tokens", new) / max(seconds, 1e-9), 1),
        truncated_tokens=total("truncated_tokens"),
        padding=round(1 - tokens / padded, 4) if padded else 0.0,
        cost=None if cost is None else round(cost, 6),
        cost_per_million_rows=None if cost is None or not new_rows else round(cost / new_rows * 1e6, 4),
    )


def report_rows(report: TransformReport) -> list[tuple[str, str]]:
    shown = {
        "rows": f"{report.rows:,}" + (f", {report.resumed_rows:,} of them before" if report.resumed_rows else ""),
        "errors": f"{report.errors:,}",
        "shards": f"{report.shards:,}",
        "time": f"{_duration(report.seconds)}, {report.rows_per_s:,.0f} rows/s",
        "tokens": f"{report.tokens:,}, {report.tokens_per_s:,.0f} tokens/s",
        "padding": f"{report.padding:.1%} of the computed tokens",
    }
    if report.truncated_tokens:
        shown["truncated"] = f"{report.truncated_tokens:,} tokens"
    if report.cost is not None:
        shown["cost"] = f"{report.cost:,.4f}, {report.cost_per_million_rows or 0:,.2f} for a million rows"
    return [("model", report.model), *shown.items()]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


REPORT_FILE = "_report.json"
# The version of the fingerprint. A change in how rows are read, batches are made or results are written needs
# a new version.
_FORM = 2

# Runs shards, yields each when it is complete, and reports finished rows to a function.
RunShards = Callable[[Sequence[Shard], ShardWork, Callable[[RowProgress], None]], AsyncIterator[DoneShard]]


@dataclass(frozen=True, slots=True)
class TransformPlan:
    request: TransformRequest
    input: TransformInput
    work: ShardWork
    model: ModelFacts


def make_plan(request: TransformRequest, model: ModelFacts, template: TaskInput) -> TransformPlan:
    """Reads the input once, and plans a run. `template`: the task's input with the fields that all rows share. Raises
    SetupError.
    """
    input = scan_input(find_inputs(request.inputs), request.input_format, request.shard_rows)
    output_format = request.output_format or input.format
    find_format(output_format)
    is_openai = input.format == "openai"
    rows: RowTask = OpenAiRows(model.name, model.prompt_names) if is_openai else _task_rows(request, input, template)
    return TransformPlan(request, input, ShardWork(request.output, input.format, output_format, rows), model)


def _task_rows(request: TransformRequest, input: TransformInput, template: TaskInput) -> TaskRows:
    """Returns the task's work on rows. Raises SetupError, also for columns that no file has."""
    for field, column in request.columns.items():
        _check_column(input, column, "--column", f"; name the column of {field!r} by --column {field}=COLUMN")
    for name in request.keep:
        _check_column(input, name, "--keep")
    kept_columns = [Column(name, input.kinds.get(name, "string")) for name in request.keep]
    are_texts = input.format == "csv"
    rows = TaskRows(request.task, template, request.columns, kept_columns, request.prefix, cells_are_texts=are_texts)
    names = [column.name for column in rows.columns]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise SetupError(f"--keep: {', '.join(duplicates)} is also a column of the result; give --prefix")
    return rows


async def run_plan(plan: TransformPlan, run: RunShards, say: Callable[[str], None]) -> TransformReport:
    """Runs the shards that are not done yet. Raises SetupError, TooManyErrors, and the engine's errors."""
    folder = open_folder(plan.request.output)
    manifest = ShardManifest(folder)
    with folder.locked():
        try:
            manifest.begin(*_describe(plan))
        except SetupError as error:
            raise SetupError(f"--output {plan.request.output}: {error}") from error
        done = manifest.done()
        numbers = {shard.number for shard in done}
        todo = [shard for shard in plan.input.shards if shard.number not in numbers]
        if done:
            say(f"{sum(shard.rows for shard in done):,} rows in {len(done)} shards are done already")
        progress = RunProgress(plan.input.rows, done, plan.request.max_errors)
        new: list[DoneShard] = []
        try:
            if todo:
                async for shard in run(todo, plan.work, progress.note):
                    new.append(shard)  # noqa: PERF401 (what is done counts, whatever comes)
        finally:
            progress.end()
        shards = sorted([*done, *new], key=lambda shard: shard.number)
        report = make_report(
            f"{plan.model.name} {plan.model.version}", shards, new, progress.seconds, plan.request.price_per_hour
        )
        manifest.complete(shards)
        write_file(folder, REPORT_FILE, (json.dumps(asdict(report), indent=2) + "\n").encode())
    for row in progress.errors:
        say(f"{row.file} row {row.row}: {row.message}")
    return report


def run_with(engine: Engine) -> RunShards:
    return lambda shards, work, note: run_shards(shards, work, engine, note)


def _describe(plan: TransformPlan) -> tuple[str, dict[str, object]]:
    """Returns a run's fingerprint and description.

    Two runs have the same fingerprint if the same command would write the same files. The description is for people:
    the same facts, with the names of files.
    """
    request, model = plan.request, plan.model
    description: dict[str, object] = {
        "model": f"{model.name} {model.version}",
        "digest": model.digest,
        "batching": model.batching,
        "task": request.task,
        "input": [asdict(file) for file in plan.input.files],
        "formats": [plan.input.format, plan.work.output_format],
        "columns": dict(request.columns),
        "keep": list(request.keep),
        "options": json.loads(request.options),
        "prefix": request.prefix,
        "shard_rows": request.shard_rows,
    }
    parts = {**description, "form": _FORM, "input": [(file.digest, file.rows) for file in plan.input.files]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(), description
