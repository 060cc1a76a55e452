"""A whole run: reads the input, goes on where a run before has ended, and reports."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.files import find_inputs
from neuronpipe.bulk.transform.folders import open_folder, write_file
from neuronpipe.bulk.transform.formats import find_format
from neuronpipe.bulk.transform.manifest import DoneShard, Manifest
from neuronpipe.bulk.transform.openai_batch import OpenAiRows
from neuronpipe.bulk.transform.plan import Input, Shard, check_columns, fingerprint, kept_columns, scan_input
from neuronpipe.bulk.transform.progress import Report, RunProgress, make_report
from neuronpipe.bulk.transform.request import Engine, ModelFacts, TransformRequest
from neuronpipe.bulk.transform.rows import RowTask, TaskRows
from neuronpipe.bulk.transform.shards import Progress, ShardWork, run_shards
from neuronpipe.core.errors import SetupError

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
