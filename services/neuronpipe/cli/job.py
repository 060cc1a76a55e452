"""`neuronpipe job`: submits jobs to a gateway, lists, waits for and cancels them; shows those that were set aside."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from neuronpipe.cli.request import add_request, add_target, parse_timeout_s, read_requests, tls_files
from neuronpipe.cli.terminal import print_table, seconds
from neuronpipe.core.errors import JobNotFound, SetupError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from neuronpipe.bulk.jobs.job import Job
    from neuronpipe.bulk.jobs.store import JobStore
    from neuronpipe.client import Client, JobStatus

HELP = "submit jobs, list, wait for and cancel them"
EXTRA = "worker"

_COLUMNS = ("JOB", "STATE", "PRIORITY", "INPUTS", "DONE", "ATTEMPTS", "SUBMITTED", "REQUEST ID")
_DEAD_COLUMNS = ("JOB", "TENANT", "WORKERS", "SET ASIDE", "REQUEST ID")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neuronpipe job`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    submit = verbs.add_parser("submit", help="submit a job, and print its name")
    add_target(submit)
    source = submit.add_argument_group("for inputs in an object")
    source.add_argument("--input-uri", default="", metavar="URI", help="of each line an InferRequest as JSON")
    add_request(submit, is_required=False)
    submit.add_argument("--output-uri", default="", metavar="URI", help="the object to write the outcomes to")
    submit.add_argument("--request-id", default="", metavar="ID", help="the same id again gets the same job")
    submit.add_argument("--ttl-s", type=seconds, default=0, metavar="S", help="seconds that it gets to end")
    submit.add_argument("--work-limit-s", type=seconds, default=0, metavar="S", help="seconds of work on one input")
    submit.add_argument("--job-priority", choices=("high", "normal", "low"), default="normal", help="default: normal")
    submit.add_argument("--notify", default="", metavar="URL", help="a URL to tell when it has ended")
    submit.add_argument("--wait", action="store_true", help="wait for its end, and print its outcomes")
    submit.set_defaults(verb=_submit)
    show = verbs.add_parser("list", help="list the caller's jobs, the newest first")
    add_target(show)
    show.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    show.set_defaults(verb=_list)
    wait = verbs.add_parser("wait", help="wait for the end of a job, and print its outcomes, of each input on a line")
    add_target(wait)
    wait.add_argument("--limit-s", type=parse_timeout_s, metavar="S", help="how long (default: until it has ended)")
    wait.set_defaults(verb=_wait)
    cancel = verbs.add_parser("cancel", help="cancel a job")
    add_target(cancel)
    cancel.set_defaults(verb=_cancel)
    for verb in (wait, cancel):
        verb.add_argument("name", metavar="JOB", help="its name, as jobs/ID")
    _add_dead(verbs.add_parser("dead", help="jobs that were set aside, since workers died while they had them"))


def run(options: argparse.Namespace) -> None:
    """Runs one of the commands. Raises SetupError, and the error of the call or of the job."""
    options.verb(options)


def _add_dead(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = verbs.add_parser("list", help="list them")
    show.set_defaults(verb=_list_dead)
    retry = verbs.add_parser("retry", help="let them run again")
    retry.set_defaults(verb=_retry_dead)
    retry.add_argument("name", nargs="+", metavar="JOB", help="their names, as jobs/ID")
    for verb in (show, retry):
        verb.add_argument(
            "--jobs-redis-url",
            default=argparse.SUPPRESS,
            metavar="URL",
            help="Redis of the jobs (or NEURONPIPE_JOB_JOBS_REDIS_URL)",
        )
        verb.add_argument(
            "--jobs-redis-prefix", default=argparse.SUPPRESS, metavar="P", help="default: neuronpipe-jobs"
        )


def _client(options: argparse.Namespace) -> "Client":
    from neuronpipe.client import Client

    return Client(options.target, timeout_s=options.timeout_s, tls=tls_files(options))


def _submit(options: argparse.Namespace) -> None:
    from neuronpipe.api.v1.jobs_pb2 import JobPriority

    if not (options.input_uri or options.model):
        raise SetupError("there is no input: give --model and its input, or --input-uri")
    if options.input_uri and options.model:
        raise SetupError("--input-uri: not with --model; each line of the object names its own")
    with _client(options) as client:
        job = client.submit(
            [] if options.input_uri else read_requests(options, client),
            input_uri=options.input_uri,
            output_uri=options.output_uri,
            request_id=options.request_id,
            time_to_live_s=int(options.ttl_s),
            work_limit_s=int(options.work_limit_s),
            priority=JobPriority.Value(f"JOB_PRIORITY_{options.job_priority.upper()}"),
            notification_url=options.notify,
        )
        print(job.name, flush=True)
        if options.wait:
            _print_outcomes(client, job.name, None)


def _list(options: argparse.Namespace) -> None:
    with _client(options) as client:
        print_table([_COLUMNS, *map(_row, client.list_jobs(options.limit))])


def _wait(options: argparse.Namespace) -> None:
    with _client(options) as client:
        _print_outcomes(client, options.name, options.limit_s)


def _cancel(options: argparse.Namespace) -> None:
    with _client(options) as client:
        client.job(options.name).cancel()


def _print_outcomes(client: "Client", name: str, limit_s: float | None) -> None:
    """Prints outcomes as JSON, and exits with 1 where an input failed."""
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

    known = status.metadata
    return (
        status.name,
        JobState.Name(known.state).removeprefix("JOB_STATE_").lower(),
        JobPriority.Name(known.priority).removeprefix("JOB_PRIORITY_").lower(),
        str(known.inputs or "?"),
        str(known.completed_inputs),
        str(known.attempts),
        f"{known.create_time.ToDatetime():%Y-%m-%d %H:%M:%S}",
        known.request_id,
    )


def _list_dead(options: argparse.Namespace) -> None:
    async def show(store: "JobStore") -> None:
        print_table([_DEAD_COLUMNS, *map(_dead_row, await store.dead())])

    _with_store(options, show)


def _retry_dead(options: argparse.Namespace) -> None:
    from neuronpipe.bulk.jobs.job import id_of

    async def retry(store: "JobStore") -> None:
        for name in options.name:
            if not await store.retry(id_of(name)):
                raise JobNotFound(f"{name} is none that was set aside; `neuronpipe job dead list` shows all of them")
            print(f"{name} waits again")

    _with_store(options, retry)


def _dead_row(job: "Job") -> tuple[str, ...]:
    from datetime import UTC, datetime

    aside = datetime.fromtimestamp(job.ended_ms / 1000, UTC)
    return job.name, job.tenant, str(job.attempts - 1), f"{aside:%Y-%m-%d %H:%M:%S}", job.request_id


def _with_store(options: argparse.Namespace, use: "Callable[[JobStore], Awaitable[None]]") -> None:
    from neuronpipe.bulk.jobs.settings import JobCommandSettings
    from neuronpipe.bulk.jobs.store import JobStore
    from neuronpipe.core.settings import read_options

    settings = read_options(JobCommandSettings, vars(options))
    if not settings.jobs_redis_url:
        raise SetupError("--jobs-redis-url: is missing; give the Redis URL of the jobs")

    async def ask() -> None:
        store = JobStore(settings)
        try:
            await use(store)
        finally:
            await store.close()

    asyncio.run(ask())
