"""`neuronpipe cache`: counts, deletes and fills the caches in Redis."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.bundle import add_trusted_keys
from neuronpipe.cli.repository import folder
from neuronpipe.cli.terminal import add_command, option, report
from neuronpipe.core.errors import InvalidInput, SetupError, Unavailable
from neuronpipe.core.files import read_lines

if TYPE_CHECKING:
    from neuronpipe.api.v1.tasks_pb2 import TaskInput
    from neuronpipe.core.packed import Packed
    from neuronpipe.platform.cache.remote import Remote
    from neuronpipe.platform.cache.settings import RedisSettings
    from neuronpipe.stages.tokenizer.encoder import Encoder

HELP = "show, delete or fill the caches in Redis"
EXTRA = "tokenizer"

_KINDS = ("tokens", "pixels", "results")
# Long, because no request waits for these commands.
_TIMEOUT_S = 10.0
_SAMPLED_KEYS = 500
_BATCH = 256
_MAX_FILE_BYTES = 1 << 30
_REPORT_EVERY_S = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = add_command(verbs, "stats", "count what is cached in Redis")
    stats.set_defaults(verb=_stats)
    clear = add_command(verbs, "clear", "delete what is cached in Redis")
    clear.set_defaults(verb=_clear)
    option(clear, "--kind", "clear only this kind of values (default: all)", choices=_KINDS)
    warm = add_command(verbs, "warm", "encode inputs and store them in Redis ahead of requests")
    warm.set_defaults(verb=_warm)
    option(warm, "--repository DIR", "folder of bundles", folder, required=True)
    add_trusted_keys(warm)
    option(warm, "--model M", "the model's name", required=True)
    option(warm, "--version V", "the model's version (default: the newest)", "")
    source = warm.add_mutually_exclusive_group(required=True)
    option(source, "--texts FILE", "UTF-8, one text on each line, for tasks of one text", Path)
    option(source, "--inputs FILE", """UTF-8, one TaskInput as JSON on each line, as {"sentence_embedding": …}""", Path)
    option(warm, "--tenant T", "tenant that will send the inputs, if tenants share no cache", "")
    option(warm, "--special-tokens-in-texts", "required if the tokenizer's setting of this name lists the model")
    for verb in (stats, clear, warm):
        option(verb, "--redis-url URL", "Redis of the services (or NEURONPIPE_CACHE_REDIS_URL)", argparse.SUPPRESS)
        option(verb, "--redis-prefix P", "prefix of the services' keys (default: neuronpipe)", argparse.SUPPRESS)
    option(warm, "--redis-ttl-s S", "seconds that Redis keeps the values (default: a week)", argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Runs a subcommand. Raises Unavailable if Redis does not answer."""
    from neuronpipe.core.settings import read_options
    from neuronpipe.platform.cache.remote import Remote, RemoteError
    from neuronpipe.platform.cache.settings import CacheCommandSettings

    settings = read_options(CacheCommandSettings, vars(options)).redis
    if not settings.redis_url:
        raise SetupError("--redis-url: is missing; give the Redis URL of the services")

    async def ask() -> None:
        remote = Remote(
            settings.redis_url,
            prefix=settings.redis_prefix,
            timeout_s=_TIMEOUT_S,
            connections=settings.redis_connections,
        )
        try:
            await options.verb(options, remote, settings)
        except RemoteError as error:
            raise Unavailable(f"Redis does not answer ({error})") from error
        finally:
            await remote.close()

    asyncio.run(ask())


async def _stats(options: argparse.Namespace, remote: "Remote", settings: "RedisSettings") -> None:
    counts = dict.fromkeys(_KINDS, 0)
    samples: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
    async for keys in remote.scan():
        for key in keys:
            kind = key.partition(b":")[0].decode(errors="replace")
            if kind in counts:
                counts[kind] += 1
                _sample(samples[kind], key, counts[kind])
    print(f"{'KIND':8} {'VALUES':>12} {'BYTES':>16}")
    for kind, count in counts.items():
        sizes = await remote.sizes(samples[kind])
        size_bytes = round(sum(sizes) / len(sizes) * count) if sizes else 0
        about = "about " if len(sizes) < count else ""
        print(f"{kind:8} {count:12,} {about + f'{size_bytes:,}':>16}")


def _sample(sample: list[bytes], key: bytes, number: int) -> None:
    """Adds the key with this number to the sample, each key with the same probability.

    The algorithm is reservoir sampling, algorithm R.
    """
    if len(sample) < _SAMPLED_KEYS:
        sample.append(key)
    elif (place := random.randrange(number)) < _SAMPLED_KEYS:
        sample[place] = key


async def _clear(options: argparse.Namespace, remote: "Remote", settings: "RedisSettings") -> None:
    kinds = (options.kind,) if options.kind else _KINDS
    prefixes = tuple(f"{kind}:".encode() for kind in kinds)
    deleted = 0
    async for keys in remote.scan():
        if chosen := [key for key in keys if key.startswith(prefixes)]:
            deleted += await remote.delete(chosen)
    print(f"{deleted:,} values deleted")


async def _warm(options: argparse.Namespace, remote: "Remote", settings: "RedisSettings") -> None:
    from neuronpipe.bundles.repository import read_trusted_repository
    from neuronpipe.core.model import ModelTable
    from neuronpipe.core.packed import pack_input
    from neuronpipe.stages.tokenizer.encoder import Encoder

    read = read_trusted_repository(options.repository, options.trusted_keys)
    bundles = ModelTable({bundle.key: bundle for bundle in read})
    bundle = bundles.find(options.model, options.version)
    inputs = [(line, pack_input(input)) for line, input in _inputs(options, bundle.spec.tasks)]
    encoder = Encoder(bundle, reads_special_tokens=options.special_tokens_in_texts)
    report = _Report(len(inputs))
    for begin in range(0, len(inputs), _BATCH):
        part = inputs[begin : begin + _BATCH]
        await _warm_batch(encoder, remote, settings.redis_ttl_s, part, options.tenant, report)
        report.show()
    report.end()


async def _warm_batch(
    encoder: "Encoder",
    remote: "Remote",
    ttl_s: int,
    inputs: "Sequence[tuple[int, Packed[TaskInput]]]",
    tenant: str,
    report: "_Report",
) -> None:
    from neuronpipe.platform.cache.cache import name_of
    from neuronpipe.platform.cache.sealing import seal, unseal
    from neuronpipe.stages.tokenizer.encoder import pack

    wanted = {name_of(encoder.kind, encoder.key(input, tenant)): (line, input) for line, input in inputs}
    stored = await remote.get(list(wanted))
    values = {}
    for (key, (line, input)), value in zip(wanted.items(), stored, strict=True):
        if value is not None and unseal(key, value) is not None:
            continue
        try:
            encoder.check(input)
            values[key] = seal(key, pack(encoder.encode(input)))
        except InvalidInput as error:
            report.refuse(line, error)
    if values:
        refused = await remote.put(values, ttl_s)
        if refused:
            problem = f"it is full, or read-only; {report.stored:,} were stored before"
            raise Unavailable(f"Redis refused to store {refused} values: {problem}")
    report.done += len(inputs)
    report.stored += len(values)


class _Report:
    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._began_s = self._shown_s = time.monotonic()
        self.done = self.stored = self.refused = 0

    def refuse(self, line: int, error: InvalidInput) -> None:
        self.refused += 1
        print(f"line {line}: {error.message}", file=sys.stderr)

    def show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _REPORT_EVERY_S:
            self._shown_s = now_s
            rate = self.done / (now_s - self._began_s)
            report(f"{self.done:,} of {self._inputs:,} inputs, {rate:,.0f} a second")

    def end(self) -> None:
        already_stored = self.done - self.stored - self.refused
        print(
            f"{self.done:,} inputs: {self.stored:,} stored, {already_stored:,} there already or given twice, "
            f"{self.refused:,} refused"
        )


def _inputs(options: argparse.Namespace, tasks: Sequence[str]) -> "Iterator[tuple[int, TaskInput]]":
    """Yields the inputs of a file, with their line numbers."""
    from google.protobuf import json_format

    from neuronpipe.api.v1.tasks_pb2 import TaskInput
    from neuronpipe.cli.task_json import read_task_input

    option, path = ("--texts", options.texts) if options.texts else ("--inputs", options.inputs)

    def of_text(line: str) -> TaskInput:
        return json_format.ParseDict({tasks[0]: {"text": line}}, TaskInput())

    def of_json(line: str) -> TaskInput:
        input = read_task_input(line)
        if input.WhichOneof("task") not in tasks:
            raise SetupError(f"it is not for the task {' or '.join(tasks).replace('_', '-')}")
        return input

    read: Callable[[str], TaskInput] = of_text if options.texts else of_json
    for number, line in read_lines(path, option, max_bytes=_MAX_FILE_BYTES):
        try:
            yield number, read(line)
        except (json_format.ParseError, SetupError) as error:
            problem = (
                "the model's task takes more than a text; use --inputs"
                if options.texts
                else f"is not an input of this model: {error}"
            )
            raise SetupError(f"{option} {path}: line {number}: {problem}") from error
