"""A whole run: reads the input, goes on where a run before has ended, shows its progress, and reports."""

import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.files import find_inputs, open_folder, write_file
from neuronpipe.bulk.transform.formats import find_format
from neuronpipe.bulk.transform.plan import (
    DoneShard,
    Input,
    Manifest,
    Shard,
    check_columns,
    fingerprint,
    kept_columns,
    scan_input,
)
from neuronpipe.bulk.transform.request import Engine, ModelFacts, TransformRequest
from neuronpipe.bulk.transform.rows import OpenAiRows, RowTask, TaskRows
from neuronpipe.bulk.transform.shards import NAMED_ERRORS, Progress, RowError, ShardWork, run_shards
from neuronpipe.core.errors import SetupError

_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S = 0.5, 30.0


class TooManyErrors(Exception):
    """More rows failed than may."""


class RunProgress:
    """Counts rows, and shows them on standard error from time to time."""

    def __init__(self, rows: int, done: Sequence[DoneShard], max_errors: int | None) -> None:
        """`rows`: of the whole input. `done`: shards of a run before, with which this one goes on."""
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
        """Since the run began to compute."""
        return time.monotonic() - self._began_s

    def note(self, progress: Progress) -> None:
        """Counts rows. Raises TooManyErrors."""
        self.rows += progress.rows
        self._failed += progress.errors
        self.errors += progress.named_errors[: NAMED_ERRORS - len(self.errors)]
        if self._max_errors is not None and self._failed > self._max_errors:
            named = "; ".join(f"{one.file} row {one.row}: {one.message}" for one in self.errors)
            raise TooManyErrors(f"{self._failed} rows failed, --max-errors is {self._max_errors}: {named}")
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
        left = _duration((self._total - done) / rate) if rate else "?"
        line = f"{done:,} of {self._total:,} rows ({share}), {rate:,.0f} rows/s, {left} left, {self._failed:,} failed"
        self._is_shown = True
        self._write(f"\r{line}\033[K" if self._is_terminal else f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. `seconds`, `rows_per_s`, `tokens_per_s` and `cost`: of this command alone; rows, errors and
    tokens: of all shards, also those that a run before has left. `padding`: the share of computed tokens that was
    padding.
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
) -> Report:
    """The figures. `new`: the shards of this command."""

    def total(read: Callable[[DoneShard], int], of: Sequence[DoneShard] = shards) -> int:
        return sum(map(read, of))

    rows, new_rows = total(lambda shard: shard.rows), total(lambda shard: shard.rows, new)
    tokens, padded = total(lambda shard: shard.tokens), total(lambda shard: shard.padded_tokens)
    cost = price_per_hour * seconds / 3600 if price_per_hour else None
    return Report(
        model=model,
        rows=rows,
        errors=total(lambda shard: shard.errors),
        shards=len(shards),
        resumed_rows=rows - new_rows,
        seconds=round(seconds, 3),
        rows_per_s=round(new_rows / max(seconds, 1e-9), 1),
        tokens=tokens,
        tokens_per_s=round(total(lambda shard: shard.tokens, new) / max(seconds, 1e-9), 1),
        truncated_tokens=total(lambda shard: shard.truncated_tokens),
        padding=round(1 - tokens / padded, 4) if padded else 0.0,
        cost=None if cost is None else round(cost, 6),
        cost_per_million_rows=None if cost is None or not new_rows else round(cost / new_rows * 1e6, 4),
    )


def report_rows(report: Report) -> list[tuple[str, str]]:
    """The report as the rows of a table."""
    figures = asdict(report)
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
    if figures["cost"] is not None:
        shown["cost"] = f"{report.cost:,.4f}, {report.cost_per_million_rows or 0:,.2f} for a million rows"
    return [("model", report.model), *shown.items()]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


REPORT_FILE = "_report.json"

# Runs shards, yields each when it is complete, and tells of rows that are done.
RunShards = Callable[[Sequence[Shard], ShardWork, Callable[[Progress], None]], AsyncIterator[DoneShard]]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it begins."""

    request: TransformRequest
    input: Input
    work: ShardWork
    model: ModelFacts
    fingerprint: str


def make_plan(request: TransformRequest, model: ModelFacts, template: TaskInput) -> Plan:
    """Reads the input once. `template`: the task's input with what all rows share. Raises SetupError."""
    input = scan_input(find_inputs(request.inputs), request.input_format, request.shard_rows)
    output_format = request.output_format or input.format
    find_format(output_format)
    rows: RowTask = OpenAiRows(model.name) if input.format == "openai" else _task_rows(request, input, template)
    mark = fingerprint(request, input, model, output_format)
    work = ShardWork(request.output, input.format, output_format, rows)
    return Plan(request, input, work, model, mark)


def _task_rows(request: TransformRequest, input: Input, template: TaskInput) -> TaskRows:
    """Raises SetupError."""
    check_columns(request.columns, input)
    rows = TaskRows(
        request.task,
        template,
        request.columns,
        kept_columns(request, input),
        request.prefix,
        cells_are_texts=input.format == "csv",
    )
    names = [column.name for column in rows.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SetupError(f"--keep: {', '.join(twice)} is a column of the result, too; give --prefix")
    return rows


async def run_plan(plan: Plan, run: RunShards, say: Callable[[str], None]) -> Report:
    """Runs what is not done yet. Raises SetupError, TooManyErrors, and what ends a run of the engine."""
    folder = open_folder(plan.request.output)
    manifest = Manifest(folder)
    with folder.locked():
        try:
            manifest.begin(plan.fingerprint, _describe(plan))
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
    """Runs shards in this process."""
    return lambda shards, work, note: run_shards(shards, work, engine, note)


def _describe(plan: Plan) -> dict[str, object]:
    """What a person can tell runs apart by. The fingerprint is what counts."""
    request, model = plan.request, plan.model
    return {
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
