"""`neuronpipe transform`: its options, and the request. Imports its dependencies only when it runs."""

import argparse
import asyncio
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from neuronpipe.cli.bundle import add_trusted_keys
from neuronpipe.cli.repository import folder
from neuronpipe.cli.request import add_key, add_tls, parse_target, parse_timeout_s, tls_files
from neuronpipe.cli.serve import event_loop
from neuronpipe.cli.terminal import ended_by_signals, ending_on_sigterm, made, option, print_table, say
from neuronpipe.core.errors import SetupError
from neuronpipe.core.task_inputs import NEEDED

if TYPE_CHECKING:
    from neuronpipe.api.v1.tasks_pb2 import TaskInput
    from neuronpipe.bulk.transform.ray_data import RayRequest
    from neuronpipe.bulk.transform.request import ModelFacts, TransformRequest
    from neuronpipe.bulk.transform.run import TransformPlan, TransformReport

HELP = "run a model on files of rows, and write files of results"
EXTRA = "all"

_EXTRAS = {"pyarrow": "parquet", "ray": "ray", "obstore": "s3"}
_FORMATS = ("jsonl", "csv", "parquet")
# The format of OpenAI's batch files, and the options that its rows contain themselves.
_OPENAI, _NOT_OF_OPENAI = "openai", ("column", "keep", "options", "prefix", "output_format", "task")


def add_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_mutually_exclusive_group(required=True)
    option(engine, "--repository DIR", "folder of bundles: run the model in process", folder)
    option(engine, "--target HOST:PORT", "a gateway that runs the model", parse_target)
    add_tls(parser)
    add_key(parser)
    option(parser, "--timeout-s S", "seconds to wait for a silent gateway (default: 60)", parse_timeout_s, default=60.0)
    option(parser, "--model M", "the model's name", required=True)
    option(parser, "--version V", "the model's version (default: the newest)", "")
    option(
        parser,
        "--task TASK",
        "the task (default: the task that the model was compiled for)",
        choices=[task.replace("_", "-") for task in NEEDED],
    )
    rows = parser.add_argument_group("rows")
    option(
        rows,
        "--input PATH",
        "files, folders or patterns: JSON Lines, CSV, Parquet; also .gz and .zst",
        required=True,
        action="extend",
        nargs="+",
    )
    option(
        rows,
        "--input-format",
        "format, if the filenames do not say it; openai: OpenAI's batch files, with requests to /v1/embeddings",
        "",
        choices=(*_FORMATS, _OPENAI),
    )
    option(rows, "--column FIELD=COLUMN", "the column of a field of the task's input", action="append")
    option(rows, "--options JSON", "fields that all rows share, as '{\"top_k\": 3}'", "{}")
    results = parser.add_argument_group("results")
    option(results, "--output DIR", "the folder of the results", required=True)
    option(results, "--output-format", "format of the results (default: the input's)", "", choices=_FORMATS)
    option(results, "--keep COLUMN,…", "columns of the input to copy to the results", "")
    option(results, "--prefix P", "prefix of the names of the result's columns", "")
    option(results, "--shard-rows N", "rows of an output file (default: 10,000)", 10_000)
    option(results, "--max-errors N", "end when more than N rows have failed (default: no limit)", int)
    option(parser, "--price-per-hour USD", "price of the machine, for the cost", 0.0)
    near = parser.add_argument_group("in process", "Other settings are variables: see the reference of settings.")
    add_trusted_keys(parser)
    option(near, "--backend BACKEND", "back end (default: the first of the bundle)", argparse.SUPPRESS)
    option(near, "--cores CORES", "number of cores, or a range such as 0-1 (default: all)", argparse.SUPPRESS)
    ray = parser.add_argument_group("on a Ray cluster", "With --repository and --output at paths that all nodes have.")
    option(ray, "--ray ADDRESS", "the cluster, as auto or ray://HOST:10001; local: a cluster for this run")
    option(ray, "--actors N", "processes with the model (default: 1)", 1)
    option(ray, "--actor-cpus N", "CPUs of each actor (default: 1)", 1.0)
    option(ray, "--actor-gpus N", "GPUs of each actor", 0.0)
    option(ray, "--actor-neuron-cores N", "NeuronCores of each actor", 0.0)


def run(options: argparse.Namespace) -> None:
    """Prints the report. Raises SetupError, SystemExit if too many rows failed, and errors that ended the run."""
    from neuronpipe.bulk.transform.run import TooManyErrors, report_rows

    try:
        report = _run(options)
    except TooManyErrors as error:
        raise SystemExit(f"neuronpipe: {error}") from error
    except ModuleNotFoundError as error:
        options.extra = _EXTRAS.get(str(error.name), options.extra)
        raise
    print_table(report_rows(report))


def _run(options: argparse.Namespace) -> "TransformReport":
    from neuronpipe.core.logs import start_logging

    start_logging("transform", "warnings")
    request = _request(options)
    # As in services (docs/decisions/0002).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with ending_on_sigterm(), asyncio.Runner(loop_factory=event_loop) as runner:
        work = _run_far(options, request) if options.target else _run_near(options, request)
        return runner.run(ended_by_signals(work))


async def _run_far(options: argparse.Namespace, request: "TransformRequest") -> "TransformReport":
    from neuronpipe.bulk.transform.far_engine import running_far_engine
    from neuronpipe.bulk.transform.run import run_plan, run_with

    target, tls = options.target, tls_files(options)
    async with running_far_engine(target, options.model, options.version, options.timeout_s, tls) as engine:
        return await run_plan(_plan(options, request, engine.model), run_with(engine), say)


async def _run_near(options: argparse.Namespace, request: "TransformRequest") -> "TransformReport":
    from neuronpipe.bulk.transform.near_engine import TransformSettings, facts_of, find_bundle, running_near_engine
    from neuronpipe.bulk.transform.run import run_plan, run_with
    from neuronpipe.core.settings import read_options
    from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

    settings = read_options(TransformSettings, vars(options))
    os.environ.update(runtime_environment(settings.executor.cores, os.environ))
    repository, trusted_keys = options.repository.absolute(), options.trusted_keys and options.trusted_keys.absolute()
    bundle = find_bundle(repository, options.model, options.version, trusted_keys)
    plan = _plan(options, request, facts_of(bundle, settings))
    if options.ray:
        from neuronpipe.bulk.transform.ray_data import ActorWork, run_on_ray

        ray = _ray_request(options)
        cores = 0 if ray.gpus or ray.neuron_cores else max(1, int(ray.cpus))
        executor = settings.executor.model_copy(update={"cores": cores})
        actor_settings = settings.model_copy(update={"executor": executor})
        facts = plan.model
        actor_work = partial(ActorWork, repository, trusted_keys, facts.name, facts.version, actor_settings)
        return await run_plan(plan, run_on_ray(ray, actor_work), say)
    async with running_near_engine(bundle, settings) as engine:
        return await run_plan(plan, run_with(engine), say)


def _request(options: argparse.Namespace) -> "TransformRequest":
    """Returns the request, without the fields that depend on the model. Raises SetupError."""
    from neuronpipe.bulk.transform.request import TransformRequest

    for name, least in (("shard_rows", 1), ("max_errors", 0), ("price_per_hour", 0)):
        value = getattr(options, name)
        if value is not None and not least <= value < float("inf"):
            raise SetupError(f"--{name.replace('_', '-')} {value}: must be {least} or more")
    if options.ray and options.target:
        raise SetupError("--ray: needs --repository; a gateway distributes the work itself")
    if options.input_format == _OPENAI:
        for name in _NOT_OF_OPENAI:
            if getattr(options, name) not in (None, "", "{}"):
                raise SetupError(f"--{name.replace('_', '-')}: not with --input-format openai, whose rows say all")
    task = (options.task or "").replace("-", "_")
    keep = [name for name in dict.fromkeys(options.keep.split(",")) if name]
    return made(TransformRequest, options, inputs=options.input, task=task, keep=keep)


def _plan(options: argparse.Namespace, request: "TransformRequest", model: "ModelFacts") -> "TransformPlan":
    """Plans the run. Raises SetupError."""
    from neuronpipe.bulk.transform.run import make_plan

    is_openai = request.input_format == _OPENAI
    task = request.task or ("sentence_embedding" if is_openai else model.tasks[0])
    if task not in model.tasks and task not in ("tokenization", "detokenization"):
        tasks = " and ".join(model.tasks).replace("_", "-")
        raise SetupError(f"--task {options.task}: model {model.name!r} supports {tasks}")
    template, shared = _template(task, request.options)
    columns = {} if is_openai else _columns(task, options.column or (), shared)
    return make_plan(replace(request, task=task, columns=columns), model, template)


def _template(task: str, text: str) -> "tuple[TaskInput, Collection[str]]":
    """Returns the input that all rows share, and its fields. Raises SetupError."""
    from neuronpipe.cli.task_json import read_task_input

    try:
        template = read_task_input(f'{{"{task}": {text}}}')
    except SetupError as error:
        raise SetupError(f"--options: {error}") from error
    getattr(template, task).SetInParent()
    return template, [field.name for field, _ in getattr(template, task).ListFields()]


def _columns(task: str, words: Sequence[str], shared: Collection[str]) -> dict[str, str]:
    """Returns the columns of a task's fields: the named and the needed fields. Raises SetupError."""
    from neuronpipe.api.v1.tasks_pb2 import TaskInput

    fields = getattr(TaskInput(), task).DESCRIPTOR.fields_by_name
    columns = {field: field for field in NEEDED[task] if field not in shared}
    for word in words:
        field, _, column = word.partition("=")
        field = field.replace("-", "_")
        if not column or field not in fields or fields[field].enum_type:
            columns_of_task = ", ".join(name for name in fields if not fields[name].enum_type)
            raise SetupError(
                f"--column {word}: must be FIELD=COLUMN, with a field of {task.replace('_', '-')}: {columns_of_task}"
            )
        columns[field] = column
    if duplicates := sorted(columns.keys() & shared):
        raise SetupError(f"--column {duplicates[0]}: --options has it as well")
    return columns


def _ray_request(options: argparse.Namespace) -> "RayRequest":
    """Returns the request to Ray. Raises SetupError."""
    from neuronpipe.bulk.transform.ray_data import RayRequest

    for name in ("actors", "actor_cpus", "actor_gpus", "actor_neuron_cores"):
        if getattr(options, name) < (name == "actors"):
            raise SetupError(f"--{name.replace('_', '-')} {getattr(options, name)}: is too few")
    return RayRequest(options.ray, options.actors, options.actor_cpus, options.actor_gpus, options.actor_neuron_cores)
