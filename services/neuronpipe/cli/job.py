"""`neuronpipe job`: submits jobs to a gateway, lists, waits for and cancels them; shows jobs that were set aside."""

import argparse
import asyncio
import math
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from neuronpipe.cli.request import add_request, add_target, connected, parse_timeout_s, read_requests
from neuronpipe.cli.terminal import add_command, option, print_table, seconds, subcommand
from neuronpipe.core.errors import JobNotFound, SetupError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from neuronpipe.bulk.jobs.job import StoredJob
    from neuronpipe.bulk.jobs.store import JobStore
    from neuronpipe.client import Client, JobStatus

HELP = "submit jobs, list, wait for and cancel them"
EXTRA = "worker"

_COLUMNS = ("JOB", "STATE", "PRIORITY", "INPUTS", "DONE", "ATTEMPTS", "SUBMITTED", "REQUEST ID")
_MAX_UINT32 = (1 << 32) - 1
_DEAD_COLUMNS = ("JOB", "TENANT", "WORKERS", "SET ASIDE", "REQUEST ID")


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    submit = subcommand(verbs, "submit", _submit, "submit a job, and print its name")
    add_target(submit)
    source = submit.add_argument_group("for inputs in an object")
    option(source, "--input-uri URI", "object with an InferRequest as JSON on each line", "")
    add_request(submit, is_required=False)
    option(submit, "--output-uri URI", "the object to write the outcomes to", "")
    option(submit, "--request-id ID", "the same id again gets the same job", "")
    option(submit, "--ttl-s S", "seconds that the job gets to end", _whole_seconds, default=0)
    option(submit, "--work-limit-s S", "seconds of work on one input", _whole_seconds, default=0)
    option(submit, "--job-priority", "job priority (default: normal)", "normal", choices=("high", "normal", "low"))
    option(submit, "--notify URL", "a URL to notify when the job has ended", "")
    option(submit, "--wait", "wait for the job's end, and print its outcomes")
    show = subcommand(verbs, "list", _list, "list the caller's jobs, the newest first")
    add_target(show)
    option(show, "--limit N", "maximum number of jobs (default: 20)", 20)
    wait = subcommand(verbs, "wait", _wait, "wait for the end of a job, and print its outcomes, one line per input")
    add_target(wait)
    option(wait, "--limit-s S", "seconds to wait (default: until the job has ended)", parse_timeout_s)
    cancel = subcommand(verbs, "cancel", _cancel, "cancel a job")
    add_target(cancel)
    for verb in (wait, cancel):
        option(verb, "name JOB", "name of the job, as jobs/ID")
    _add_dead(
        add_command(verbs, "dead", "list or retry jobs that were set aside, because workers died while they had them")
    )


def _add_dead(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = subcommand(verbs, "list", _list_dead, "list the jobs")
    retry = subcommand(verbs, "retry", _retry_dead, "let jobs run again")
    option(retry, "name JOB", "names of the jobs, as jobs/ID", nargs="+")
    for verb in (show, retry):
        text = "Redis of the jobs (or NEURONPIPE_JOB_JOBS_REDIS_URL)"
        option(verb, "--jobs-redis-url URL", text, argparse.SUPPRESS)


def _whole_seconds(text: str) -> int:
    """Parses a duration as whole seconds, the unit of the API. Rounds up, because 0 means the default."""
    whole = math.ceil(seconds(text))
    if not 0 <= whole <= _MAX_UINT32:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to {_MAX_UINT32} seconds")
    return whole


def _submit(options: argparse.Namespace) -> None:
    from neuronpipe.api.v1.jobs_pb2 import JobPriority

    if not (options.input_uri or options.model):
        raise SetupError("there is no input: give --model and its input, or --input-uri")
    if options.input_uri and options.model:
        raise SetupError("--input-uri: not with --model; each line of the object names its own")
    with connected(options) as client:
        job = client.submit(
            [] if options.input_uri else read_requests(options, client),
            input_uri=options.input_uri,
            output_uri=options.output_uri,
            request_id=options.request_id,
            time_to_live_s=options.ttl_s,
            work_limit_s=options.work_limit_s,
            priority=JobPriority.Value(f"JOB_PRIORITY_{options.job_priority.upper()}"),
            notification_url=options.notify,
        )
        print(job.name, flush=True)
        if options.wait:
            _print_outcomes(client, job.name, None)


def _list(options: argparse.Namespace) -> None:
    with connected(options) as client:
        print_table([_COLUMNS, *map(_row, client.list_jobs(options.limit))])


def _wait(options: argparse.Namespace) -> None:
    with connected(options) as client:
        _print_outcomes(client, options.name, options.limit_s)


def _cancel(options: argparse.Namespace) -> None:
    with connected(options) as client:
        client.job(options.name).cancel()


def _print_outcomes(client: "Client", name: str, limit_s: float | None) -> None:
    """Prints outcomes as JSON, and exits with 1 if an input failed."""
    from google.protobuf import json_format

    job = client.job(name)
    for outcome in job.wait(limit_s):
        print(
            json_format.MessageToJson(outcome, preserving_proto_field_name=True, ensure_ascii=False, indent=None),
            flush=True,
        )
    result = job.status().result
    if result and result.output_uri:
        print(result.output_uri)
    if result and result.failed:
        print(f"neuronpipe: {result.failed} of {result.succeeded + result.failed} inputs failed", file=sys.stderr)
        sys.exit(1)


def _row(status: "JobStatus") -> tuple[str, ...]:
    from neuronpipe.api.v1.jobs_pb2 import JobPriority, JobState

    metadata = status.metadata
    return (
        status.name,
        JobState.Name(metadata.state).removeprefix("JOB_STATE_").lower(),
        JobPriority.Name(metadata.priority).removeprefix("JOB_PRIORITY_").lower(),
        str(metadata.inputs or "?"),
        str(metadata.completed_inputs),
        str(metadata.attempts),
        f"{metadata.create_time.ToDatetime():%Y-%m-%d %H:%M:%S}",
        metadata.request_id,
    )


def _list_dead(options: argparse.Namespace) -> None:
    async def show(store: "JobStore") -> None:
        print_table([_DEAD_COLUMNS, *map(_dead_row, await store.dead_jobs())])

    _with_store(options, show)


def _retry_dead(options: argparse.Namespace) -> None:
    from neuronpipe.bulk.jobs.job import id_of

    async def retry(store: "JobStore") -> None:
        for name in options.name:
            if not await store.retry(id_of(name)):
                raise JobNotFound(f"{name} is none that was set aside; `neuronpipe job dead list` shows all of them")
            print(f"{name} waits again")

    _with_store(options, retry)


def _dead_row(job: "StoredJob") -> tuple[str, ...]:
    from datetime import UTC, datetime

    aside = datetime.fromtimestamp(job.ended_ms / 1000, UTC)
    return job.name, job.tenant, str(job.attempts - 1), f"{aside:%Y-%m-%d %H:%M:%S}", job.request_id


def _with_store(options: argparse.Namespace, use: "Callable[[JobStore], Awaitable[None]]") -> None:
    from neuronpipe.bulk.jobs.settings import JobCommandSettings
    from neuronpipe.bulk.jobs.store import JobStore
    from neuronpipe.core.settings import read_options

    settings = read_options(JobCommandSettings, vars(options)).jobs
    if not settings.jobs_redis_url:
        raise SetupError("--jobs-redis-url: is missing; give the Redis URL of the jobs")
    url = urlsplit(settings.jobs_redis_url)  # may have a password

    async def ask() -> None:
        store = JobStore(settings)
        try:
            await use(store)
        except Unavailable as error:
            address = url.netloc.rpartition("@")[2] or url.path
            raise Unavailable(f"--jobs-redis-url {address}: {error.message}") from error
        finally:
            await store.close()

    asyncio.run(ask())
